"""Documents in files: the formats of rows and whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from mgpu_pipe.config.data_sources import DocumentKind
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.compressed import identity_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, forget
from mgpu_pipe.data.tables import row_lines
from mgpu_pipe.data.text.documents import Document, Source, Text
from mgpu_pipe.data.text.file_check import CheckFile, check_paths
from mgpu_pipe.errors import DataError

Rows = Iterator[tuple[str, str, int]]
"""For each row: content, origin, and share of the progress."""


Content = TypeVar("Content", str, Text)
"""Description of the content of a row."""


@dataclass(frozen=True)
class FileFormat(Generic[Content]):
    """How files hold documents.

    Attributes:
        name: stands in the identity of a source.
        rows: reads the rows of a file.
        document: makes the document of a row: its content, origin and size.
        check: checks a file; of a large one (False) its beginning.
        columns: names of the columns that are read, which stand in the identity too.
        kind: kind of the documents.
    """

    name: str
    rows: Callable[[DataConfig, Path, Fingerprint], Iterator[tuple[Content, str, int]]]
    document: Callable[[DataConfig, Content, str, int], Document]
    check_file: CheckFile
    columns: Callable[[DataConfig], object] = lambda data: None
    kind: DocumentKind = "text"

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Checks the files of ``data.paths`` and ``data.validation_paths``; raises their errors together."""
        check_paths(data, self.check_file)

    def open(self, data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
        """Opens the documents of the files that ``data.paths`` name; see :meth:`open_files`.

        Raises:
            ConfigError: a path that matches nothing.
        """
        return self.open_files(data, files.expand_paths(data.paths, key), cache, progress)

    def open_files(self, data: DataConfig, paths: list[Path], cache: Path, progress: Progress) -> Source:
        """Opens the documents in ``paths``.

        Raises:
            DataError: a file that is empty or cannot be read, with ``data.on_bad_sample=stop``.
        """
        unusable = unusable_or_raise(paths, data.on_bad_sample)
        known = fingerprints([path for path in paths if path not in unusable], cache, progress)

        def documents() -> Iterator[Document]:
            try:
                rows = rows_of_files(
                    paths, unusable, lambda path: self.rows(data, path, known[path]), partial(self.document, data)
                )
                for row in rows:
                    yield Document.from_fault(row) if isinstance(row, Fault) else row
            except ChangedFileError:
                forget(paths, cache)
                raise

        return Source(
            name=data.source,
            identity=digest_of("files", self.name, self.columns(data), contents_of(paths, unusable, known)),
            size=sum(content.size for content in known.values()),
            documents=documents,
            kind=self.kind,
        )


@dataclass(frozen=True)
class ChatFormat(FileFormat[str]):
    """How files hold conversations."""

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Checks the files, then that the chat template renders the first conversation."""
        super().check(model, data)
        from mgpu_pipe.data.text.chat_templates import check_chat  # imports numpy, which other checks do not need

        check_chat(model, data)


def table_rows(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    """Reads the rows of a JSON, CSV, TSV or Parquet file as lines of JSON."""
    return row_lines(path, expected)


def nested_rows(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    """Reads rows like :func:`table_rows`, whose fields may hold lists of messages."""
    return row_lines(path, expected, nested=True)


def whole_document(data: DataConfig, content: Text, origin: str, size: int) -> Document:
    """Makes the document of a row's whole content."""
    return Document(files.whole_row(content, origin), origin, size)


def text_of(row: dict[str, Any], key: str, column: str, origin: str) -> str:
    """Returns the text of a row's column.

    Args:
        key: configuration key that names the column.

    Raises:
        DataError: there is no such column, or it holds no valid string.
    """
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
