"""Preflight checks of text files, before tokenising. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.fingerprint import check_readable
from mgpu_pipe.data.parquet_rows import is_parquet
from mgpu_pipe.data.tables import LOOKED_AT, row_lines
from mgpu_pipe.errors import BadInputError, ConfigErrors, DataError, raised_by

# Bytes that the preflight decodes at most; preparation decodes everything, also before a worker starts.
_CHECKED_BYTES = 32 << 20


CheckFile = Callable[[DataConfig, Path, bool], None]
"""Checks a file; False where it is too large to be read as a whole."""
CheckRow = Callable[[DataConfig, str, str], object]
"""Checks a row: its line of JSON and its origin."""


def check_files(data: DataConfig, patterns: list[str], key: str, check_file: CheckFile) -> None:
    """Checks the files that ``patterns`` name; raises like :func:`check_listed`."""
    here = [pattern for pattern in patterns if not pattern.startswith(DATA)]  # others are checked after the download
    check_listed(data, files.expand_paths(here, key) if here or not patterns else (), check_file)


def check_listed(data: DataConfig, paths: Iterable[Path], check_file: CheckFile) -> None:
    """Checks files.

    Raises:
        ConfigErrors: those of the files; with ``data.on_bad_sample=skip`` only where no file can be used.
    """
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
    if whole and not (is_parquet(path) or skips):
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
    columns = {key: getattr(data, key) for key in keys}
    row = files.json_row(line, origin, *columns.values())
    for key, column in columns.items():
        if column not in row:
            raise files.missing_column(origin, f"data.{key}", column, list(row))
