"""``data=text_files``: local UTF-8 text files, also compressed, a document each."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.kinds import prepare_packed_text
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.file_source import FileFormat, Rows, whole_document
from mgpu_pipe.errors import DataError


def read_texts(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    """Yields the text of a file, or of each file in a zip file."""
    members = files.members_of(path, expected)
    for number, member in enumerate(members):
        origin = str(path) if len(members) == 1 else f"{path}: {member}"
        text = _decode(files.read_bytes(path, expected, member), origin)
        yield text, origin, 0 if number else expected.size


def _decode(raw: bytes, origin: str) -> str:
    try:
        return files.decode(raw, origin).removeprefix("\ufeff")
    except DataError as error:
        return files.BrokenRow(str(error).removeprefix(f"{origin}: "))


def check_text_file(data: DataConfig, path: Path, whole: bool) -> None:
    if whole:
        files.decode(files.read_bytes(path), str(path))
    if codec_of(path) is not None:
        line, origin, _ = next(files.read_lines(path))
        files.whole_row(line, origin)


FORMAT = FileFormat("text_files", read_texts, whole_document, check_text_file)
SOURCE = DataSource(
    name="text_files", reads_files=True, check=FORMAT.check, open=FORMAT.open, prepare=prepare_packed_text
)
