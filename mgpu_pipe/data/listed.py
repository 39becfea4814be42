"""Lists of files with what is said of each: CSV or JSON Lines, a path and a word or text a line. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.text.labelled_row import label_of
from mgpu_pipe.errors import ConfigError, DataError

SUFFIXES = (".csv", ".jsonl")


@dataclass(frozen=True)
class Part:
    """Bytes of a file, from ``offset`` on, and what they are."""

    offset: int
    held: Fingerprint


@dataclass(frozen=True)
class Entry:
    """A file, or a part of one, and what is said of it; ``origin`` is where they are named."""

    path: Path
    label: str
    origin: str
    part: Part | None = None


def entries_of(path: Path, data: DataConfig, key: str, file_key: str, told_key: str, what: str) -> Iterator[Entry]:
    """The lines of the list ``path``.

    Args:
        key: that names the list.
        file_key, told_key: the keys of ``data`` that name its columns, of paths seen from its folder and of what is
            told; ``what`` names the latter.

    Raises:
        ConfigError: it is no list.
        DataError: it cannot be read, lacks a column, or names a file that is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(key, path, f"give files that end with {' or '.join(SUFFIXES)}", "is no list of files")
    columns = {name: str(getattr(data, name)) for name in (file_key, told_key)}
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path, *columns.values())
    for row, origin in rows:
        for name, column in columns.items():
            if column not in row:
                raise files.missing_column(origin, f"data.{name}", column, list(row))
        named = row[columns[file_key]]
        if not isinstance(named, str) or not named or "\0" in named:
            raise DataError(f"{origin}: the file is {named!r}, not a path; {files.FIX}")
        file = path.parent / named
        if not file.is_file():
            raise DataError(f"{origin}: there is no file {file}; {files.FIX}")
        yield Entry(file, label_of(row, columns[told_key], origin, what), origin)


def _json_rows(path: Path, *columns: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    return ((files.json_row(line, origin, *columns), origin) for line, origin, _ in files.read_lines(path))


def _csv_rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    text = files.decode(files.read_bytes(path), str(path)).removeprefix("\ufeff")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            origin = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{origin}: has not as many columns as the first line; {files.FIX}")
            yield row, origin
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: is not valid CSV: {error}; {files.FIX}") from error
