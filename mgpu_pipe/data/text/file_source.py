"""Documents in files: the formats of rows and whole texts, and their checks before tokenising. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from mgpu_pipe.config.data_sources import DocumentKind
from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.cache import Progress, answer_once, digest_of
from mgpu_pipe.data.compressed import codec_of, identity_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.earlier_tables import marks_of_tables
from mgpu_pipe.data.file_lists import label_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, check_readable, fingerprints, forget
from mgpu_pipe.data.parquet_rows import is_columnar
from mgpu_pipe.data.tables import LOOKED_AT, row_lines
from mgpu_pipe.data.text.documents import Document, Source, Text
from mgpu_pipe.data.text.earlier_versions import AGAIN, ANEW
from mgpu_pipe.errors import BadInputError, ConfigErrors, DataError, raised_by

# Bytes that the preflight decodes at most; preparation decodes everything, also before a worker starts.
_CHECKED_BYTES = 32 << 20


_REREAD_FORMAT = 3
"""Increased when a format's ``reads_anew`` knows more rows; the cache keeps its answers."""
CheckFile = Callable[[DataConfig, Path, bool], None]
"""Checks a file, given the keys, its path, and whether to read all of it."""
CheckRow = Callable[[DataConfig, str, str], object]
"""Checks a row: its line of JSON and its origin."""


def check_files(data: DataConfig, patterns: list[str], key: str, check_file: CheckFile) -> None:
    """Checks the files that ``patterns`` name; raises like :func:`check_listed`."""
    here = [pattern for pattern in patterns if not pattern.startswith(DATA)]  # others are checked after the download
    check_listed(data, files.expand_paths(here, key) if here or not patterns else (), check_file)


def check_listed(data: DataConfig, paths: Iterable[Path], check_file: CheckFile) -> None:
    """Checks files; ConfigErrors, with ``data.on_bad_sample=skip`` only where no file can be used."""
    budget, usable, skips = _CHECKED_BYTES, 0, data.on_bad_sample == "skip"
    errors: list[BadInputError] = []
    for path in paths:
        try:
            size = check_readable(path)
            if budget > 0:
                check_file(data, path, size <= budget and codec_of(path) is None)
            budget -= size
            usable += 1
        except DataError as error:
            errors.append(error if skips else DataError(f"{error}{OR_SKIP}"))
        except BadInputError as error:
            errors.append(error)
            skips = False
    if errors and not (skips and usable):
        raise ConfigErrors(errors)


def check_paths(data: DataConfig, check_file: CheckFile) -> None:
    """Checks the files of ``data.paths`` and ``data.validation_paths``; raises like :func:`check_files`."""
    errors = raised_by(lambda: check_files(data, data.paths, "data.paths", check_file))
    if data.validation_paths:
        key = "data.validation_paths"
        errors += raised_by(lambda: check_files(data, data.validation_paths, key, check_file))
    if errors:
        raise ConfigErrors(errors)


def check_first_row(data: DataConfig, path: Path, whole: bool, check_row: CheckRow, nested: bool = False) -> None:
    """Checks that a file is UTF-8 (if ``whole``, all of it), and its first row.

    With ``data.on_bad_sample=skip`` one of its first rows has to be usable.

    Args:
        nested: see :func:`mgpu_pipe.data.tables.row_lines`.
    """
    skips = data.on_bad_sample == "skip"
    if whole and not (is_columnar(path) or skips):
        files.decode(files.read_bytes(path), str(path))
    first: DataError | None = None
    for number, (line, origin, _) in enumerate(row_lines(path, nested=nested)):
        if number == LOOKED_AT:
            return
        try:
            check_row(data, line, origin)
            return
        except DataError as error:
            first = first or error
        if not skips:
            break
    if first is not None:
        raise first


def check_columns(data: DataConfig, line: str, origin: str, *keys: str) -> None:
    """Checks that a row has the columns that these keys of ``data`` name."""
    columns = {f"data.{key}": getattr(data, key) for key in keys}
    files.require_columns(files.json_row(line, origin, *columns.values()), origin, columns)


Rows = Iterator[tuple[str, str, int]]
"""For each row: content, origin, and share of the progress."""


Content = TypeVar("Content", str, Text)
"""Content of a row."""


@dataclass(frozen=True)
class FileFormat(Generic[Content]):
    """How files hold documents.

    Attributes:
        name: part of the identity of a source.
        rows: reads the rows of a file.
        document: makes the document of a row: its content, origin and size.
        check_file: checks a file, or only its beginning.
        columns: names of the columns that are read, also part of the identity.
        kind: kind of the documents.
        others: further files that the rows of a file are made of.
        reads_anew: marks a row (a line of JSON) that earlier versions read otherwise; empty for any other. Only files
            with such a row get another identity than they gave.
        is_table: whether the rows are those of :func:`mgpu_pipe.data.tables.row_lines`.
    """

    name: str
    rows: Callable[[DataConfig, Path, Fingerprint], Iterator[tuple[Content, str, int]]]
    document: Callable[[DataConfig, Content, str, int], Document]
    check_file: CheckFile
    columns: Callable[[DataConfig], object] = lambda data: None
    kind: DocumentKind = "text"
    others: Callable[[Path], Sequence[Path]] = lambda path: ()
    reads_anew: Callable[[DataConfig, str], str] | None = None
    is_table: bool = False

    def source(self, **declared: Any) -> DataSource:
        """Declares the data source of this name, which reads such files."""
        return DataSource(
            name=self.name, documents=self.kind, reads_files=True, check=self.check, open=self.open, **declared
        )

    def check(self, model: ModelConfig, data: DataConfig) -> None:
        """Checks the files of ``data.paths`` and ``data.validation_paths``; raises their errors together."""
        check_paths(data, self.check_file)

    def open(self, data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
        """Opens the documents of the files in ``data.paths``; ConfigError if one matches nothing. See
        :meth:`open_files`."""
        return self.open_files(data, files.expand_paths(data.paths, key), cache, progress)

    def open_files(self, data: DataConfig, paths: list[Path], cache: Path, progress: Progress) -> Source:
        """Opens the documents in ``paths``; DataError for an unusable file with ``data.on_bad_sample=stop``."""
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

        contents = contents_of(paths, unusable, known)
        identity: list[Any] = ["files", self.name, self.columns(data), contents]
        if others := [file for path in known for file in self.others(path)]:
            identity.append(contents_of(others, {}, fingerprints(others, cache, progress)))
        identity += marks_of_tables(contents, known, cache) if self.is_table else []
        if self.reads_anew is not None:
            marks = lru_cache(partial(self._marks_of_rows, data, known, cache))
            question: list[Any] = [*identity, _REREAD_FORMAT]
            for mark in (ANEW, AGAIN):
                if answer_once(cache, [*question, mark], partial(lambda mark: mark in marks(), mark)):
                    identity.append(mark)
        return Source(
            name=data.source,
            identity=digest_of(*identity),
            size=sum(content.size for content in known.values()),
            documents=documents,
            kind=self.kind,
        )

    def _marks_of_rows(self, data: DataConfig, known: Mapping[Path, Fingerprint], cache: Path) -> set[str]:
        """Marks of the rows of these files that earlier versions read otherwise."""
        assert self.reads_anew is not None
        mark_row = partial(self.reads_anew, data)
        lines = partial(row_lines, nested=True)
        rows = rows_of_files(known, {}, lambda path: lines(path, known[path]), lambda line, *_: mark_row(line))
        try:
            return {mark for mark in rows if isinstance(mark, str)}
        except ChangedFileError:
            forget(list(known), cache)
            raise


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
    """Returns the text of a row's column, named by the configuration's ``key``; DataError if it holds no valid
    string."""
    files.require_columns(row, origin, {key: column})
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{origin}: column '{column}' holds {type(text).__name__}, not a string; {files.FIX}")
    files.check_unicode(text, origin)
    return text


def unusable_or_raise(paths: Sequence[Path], on_bad_sample: str) -> dict[Path, str]:
    """Reasons for files that are empty or do not open; DataError if ``on_bad_sample`` is ``stop``."""
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


class Row(NamedTuple):
    """One line: its one or two texts, class, origin, and share of the progress."""

    texts: tuple[str, ...]
    label: str
    origin: str
    size: int

    @property
    def whole_text(self) -> str:
        """Text that decides the split, and that trains a tokenizer."""
        return "\n".join(self.texts)


def row_of(data: DataConfig, line: str, origin: str, size: int = 0) -> Row:
    """Parses a line of ``data.paths``; DataError if it is broken or a column is missing or of another type."""
    columns = {"data.text_column": data.text_column}
    if data.second_text_column is not None:
        columns["data.second_text_column"] = data.second_text_column
    row = files.json_row(line, origin, *columns.values(), data.label_column)
    texts = tuple(text_of(row, key, column, origin) for key, column in columns.items())
    files.require_columns(row, origin, {"data.label_column": data.label_column})
    return Row(texts, label_of(row, data.label_column, origin), origin, size)
