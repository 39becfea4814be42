"""Documents in files: whole texts, and rows of text, conversations, preferences and pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.compressed import identity_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, forget
from mgpu_pipe.data.parquet import parquet_rows
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.preference_rows import preference_of, prompt_of
from mgpu_pipe.errors import DataError

NESTED = ("chat_jsonl", "preferences_jsonl")
"""Sources whose rows hold lists of messages."""
Rows = Iterator[tuple[str, str, int]]
"""For each row: content, origin, and share of the progress."""


def file_source(data: DataConfig, paths: list[Path], cache: Path, progress: Progress) -> Source:
    """Builds the source of the documents in ``paths``.

    Raises:
        DataError: a file that is empty or cannot be read, with ``data.on_bad_sample=stop``.
    """
    unusable = unusable_or_raise(paths, data.on_bad_sample)
    known = fingerprints([path for path in paths if path not in unusable], cache, progress)
    column: dict[str, Any] = {
        "jsonl": data.text_column,
        "parquet": data.text_column,
        "chat_jsonl": data.messages_column if data.format == "auto" else [data.messages_column, data.format],
        "preferences_jsonl": ["preferences", data.messages_column],
        "pairs_jsonl": [data.source_column, data.target_column],
    }
    kinds: dict[str, Literal["chat", "preferences", "pairs"]] = {
        "chat_jsonl": "chat",
        "preferences_jsonl": "preferences",
        "pairs_jsonl": "pairs",
    }

    def whole(text: str, origin: str, size: int) -> Document:
        return Document(files.whole_row(text, origin), origin, size)

    def pair(line: str, origin: str, size: int) -> Document:
        return _pair(data, line, origin, size)

    def preference(line: str, origin: str, size: int) -> Document:
        chosen, _ = preference_of(files.json_row(line, origin, data.messages_column), origin, data.messages_column)
        return Document(line, origin, size, key=prompt_of(chosen))

    def text(line: str, origin: str, size: int) -> Document:
        row = files.json_row(line, origin, data.text_column)
        return Document(_text_of(row, "data.text_column", data.text_column, origin), origin, size)

    def rows(path: Path) -> Rows:
        return row_lines(path, known[path], nested=data.source in NESTED)

    readers: dict[str, tuple[Callable[[Path], Rows], Callable[[str, str, int], Document]]] = {
        "jsonl": (rows, text),
        "parquet": (lambda path: parquet_rows(path, data.text_column, expected=known[path]), whole),
        "chat_jsonl": (rows, whole),
        "preferences_jsonl": (rows, preference),
        "pairs_jsonl": (rows, pair),
    }
    read, make = readers.get(data.source, (lambda path: _whole_file(path, known[path]), whole))
    # The identity of a text file does not depend on the source's name.
    form = data.source if data.source in readers else "text_files"

    def documents() -> Iterator[Document]:
        try:
            for row in rows_of_files(paths, unusable, read, make):
                yield Document.from_fault(row) if isinstance(row, Fault) else row
        except ChangedFileError:
            forget(paths, cache)
            raise

    return Source(
        name=data.source,
        identity=digest_of("files", form, column.get(data.source), contents_of(paths, unusable, known)),
        size=sum(content.size for content in known.values()),
        documents=documents,
        kind=kinds.get(data.source, "text"),
    )


def _whole_file(path: Path, expected: Fingerprint) -> Rows:
    """Yields the text of a file, or of each file in a zip file."""
    members = files.members_of(path, expected)
    for at, member in enumerate(members):
        origin = str(path) if len(members) == 1 else f"{path}: {member}"
        yield _decoded(files.read_bytes(path, expected, member), origin), origin, 0 if at else expected.size


def _decoded(raw: bytes, origin: str) -> str:
    try:
        return files.decode(raw, origin).removeprefix("\ufeff")
    except DataError as error:
        return files.BrokenRow(str(error).removeprefix(f"{origin}: "))


def _pair(data: DataConfig, line: str, origin: str, size: int) -> Document:
    row = files.json_row(line, origin, data.source_column, data.target_column)
    source = _text_of(row, "data.source_column", data.source_column, origin)
    target = _text_of(row, "data.target_column", data.target_column, origin)
    for column, text in ((data.source_column, source), (data.target_column, target)):
        if not text:
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
    return Document(source, origin, size, target)


def _text_of(row: dict[str, Any], key: str, column: str, origin: str) -> str:
    if column not in row:
        raise files.missing_column(origin, key, column, list(row))
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{origin}: column '{column}' holds {type(text).__name__}, not a string; {files.FIX}")
    files.check_unicode(text, origin)
    return text


def unusable_or_raise(paths: Sequence[Path], on_bad_sample: str) -> dict[Path, str]:
    """Reasons for the files that are empty or cannot be opened.

    Raises:
        DataError: there is one, and ``on_bad_sample`` is ``stop``.
    """
    unusable = unusable_files(paths)
    if unusable and on_bad_sample == "stop":
        path, why = next(iter(unusable.items()))
        raise DataError(f"{path}: {why}; remove it from the data's paths{OR_SKIP}")
    return unusable


def contents_of(paths: Sequence[Path], unusable: Mapping[Path, str], known: Mapping[Path, Fingerprint]) -> list[str]:
    """Content of each file in the identity of a source."""
    return [
        f"cannot be used: {unusable[path]}" if path in unusable else identity_of(path, known[path]) for path in paths
    ]
