"""UTF-8 text files, a document each: local ones, also compressed (``data=text_files``), or the source text of the
running Python's standard library (``data=stdlib_text``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.compressed import HEAD, codec_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.text.documents import LongText, Source, Text, UndecodableError
from mgpu_pipe.data.text.file_source import FileFormat, whole_document
from mgpu_pipe.errors import DataError

_SHORT = 1 << 20
"""Characters up to which a text is a str."""


def read_texts(data: DataConfig, path: Path, expected: Fingerprint) -> Iterator[tuple[Text, str, int]]:
    """Yields the text of a file, or of each file in a zip file."""
    members = files.members_of(path, expected)
    for number, member in enumerate(members):
        origin = str(path) if len(members) == 1 else f"{path}: {member}"
        text = _decode(files.read_parts(path, expected, member), origin)
        yield text, origin, 0 if number else expected.size


def _decode(parts: Iterator[bytes], origin: str) -> Text:
    first = next(parts, b"")
    try:
        text = LongText(chain([first], parts))
        error = _binary(first, origin)
    except UndecodableError as undecodable:
        error = files.not_utf8(undecodable.error, origin, undecodable.offset, first[:HEAD])
    if error is not None:
        return files.BrokenRow(str(error).removeprefix(f"{origin}: "))
    return text if len(text) > _SHORT else str(text)


def _binary(first: bytes, origin: str) -> DataError | None:
    """Builds the error of a file with a NUL at its beginning: no text has that, though it is UTF-8."""
    return files.other_format(first[:HEAD], origin) if b"\0" in first[:HEAD] else None


def check_text_file(data: DataConfig, path: Path, whole: bool) -> None:
    if error := _binary(next(files.read_parts(path), b""), str(path)):
        raise error
    if whole:
        files.decode(files.read_bytes(path), str(path))
    if codec_of(path) is not None:
        line, origin, _ = next(files.read_lines(path))
        files.whole_row(line, origin)


FORMAT = FileFormat("text_files", read_texts, whole_document, check_text_file)


def check_library(model: ModelConfig, data: DataConfig) -> None:
    files.check_stdlib()


def open_library(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    return FORMAT.open_files(data, files.stdlib_files(), cache, progress)


SOURCES = (FORMAT.source(), DataSource(name="stdlib_text", check=check_library, open=open_library))
