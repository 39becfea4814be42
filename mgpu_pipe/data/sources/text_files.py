"""UTF-8 text files, a document each: local ones, also compressed (``data=text_files``), or the source text of the
running Python's standard library (``data=stdlib_text``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, takewhile
from pathlib import Path

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.compressed import HEAD, codec_of, is_wet, open_text
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.text.documents import LongText, Source, Text, UndecodableError
from mgpu_pipe.data.text.file_source import FileFormat, whole_document
from mgpu_pipe.errors import DataError

_SHORT = 1 << 20
"""Characters up to which a text is a str."""
_LONGEST_FIELD, _MOST_DIGITS = 1 << 16, 18
"""Bytes of a field of a WET file's record, and digits of the record's size, at most."""


def read_texts(path: Path, expected: Fingerprint | None = None) -> Iterator[tuple[Text, str, int]]:
    """Yields the text of a file, or of each file in a zip file, or of each record in a WET file."""
    if is_wet(path):
        yield from _read_records(path, expected)
        return
    members = files.members_of(path, expected)
    for number, member in enumerate(members):
        origin = str(path) if len(members) == 1 else f"{path}: {member}"
        text = _decode(files.read_parts(path, expected, member), origin)
        yield text, origin, 0 if number or expected is None else expected.size


def _read_records(path: Path, expected: Fingerprint | None) -> Iterator[tuple[Text, str, int]]:
    """Yields the texts of a WET file. A record is its first line, fields, a blank line, and as many bytes as they say
    (https://iipc.github.io/warc-specifications/specifications/warc-format/warc-1.0)."""
    number, share = 0, 0 if expected is None else expected.size
    try:
        with open_text(path, expected) as file:
            while first := file.readline(_LONGEST_FIELD):
                if not first.strip():
                    continue
                number += 1
                origin = f"{path}: record {number}"
                lines = iter(partial(file.readline, _LONGEST_FIELD), b"")
                fields = [line.lower().partition(b":") for line in takewhile(bytes.strip, lines)]
                values = {name.strip(): value.strip() for name, _, value in fields}
                size = values.get(b"content-length", b"")
                if not first.startswith(b"WARC/") or not size.isdigit() or len(size) > _MOST_DIGITS:
                    raise DataError(f"{origin}: has no head of a WARC record; {files.REPLACE}")
                content = file.read(min(int(size), files.LARGEST_TEXT))
                if len(content) < int(size):
                    raise DataError(f"{origin}: ends before its {int(size):,} bytes; {files.REPLACE}")
                if values.get(b"warc-type") == b"conversion" and content.strip():
                    yield _decode(iter([content]), origin), origin, share
                    share = 0
    except OSError as error:
        raise files.unreadable(path, f"{path}: record {number + 1}", error) from error


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


FORMAT = FileFormat(
    "text_files", lambda data, path, expected: read_texts(path, expected), whole_document, check_text_file
)


def check_library(model: ModelConfig, data: DataConfig) -> None:
    files.check_stdlib()


def open_library(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    return FORMAT.open_files(data, files.stdlib_files(), cache, progress)


SOURCES = (FORMAT.source(), DataSource(name="stdlib_text", check=check_library, open=open_library))
