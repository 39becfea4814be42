"""Preflight checks of text files, before tokenising. Imports no numpy."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.fingerprint import check_readable
from mgpu_pipe.data.parquet import is_parquet
from mgpu_pipe.data.sources.text_files import NESTED
from mgpu_pipe.data.tables import LOOKED_AT, row_lines
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.data.text.label_rows import row_of
from mgpu_pipe.data.text.preference_rows import preference_of
from mgpu_pipe.errors import BadInputError, ConfigErrors, DataError

# Bytes that the preflight decodes at most; preparation decodes everything, also before a worker starts.
_CHECKED_BYTES = 32 << 20


def check_files(data: DataConfig, patterns: list[str], key: str) -> None:
    """Checks the files that ``patterns`` name.

    Raises:
        ConfigErrors: those of the files; with ``data.on_bad_sample=skip`` only where no file can be used.
    """
    budget, usable, skips = _CHECKED_BYTES, 0, data.on_bad_sample == "skip"
    errors: list[BadInputError] = []
    here = [pattern for pattern in patterns if not pattern.startswith(DATA)]  # others are checked after the download
    for path in files.expand_paths(here, key) if here or not patterns else ():
        try:
            size = check_readable(path)
            if budget > 0:
                _check_content(data, path, size <= budget and codec_of(path) is None)
            budget -= size
            usable += 1
        except DataError as error:
            errors.append(error if skips else DataError(f"{error}{OR_SKIP}"))
        except BadInputError as error:
            errors.append(error)
            skips = False
    if errors and not (skips and usable):
        raise ConfigErrors(errors)


def _check_content(data: DataConfig, path: Path, whole: bool) -> None:
    """Checks one file; of a file larger than the budget only the beginning.

    With ``data.on_bad_sample=skip`` one of its first rows has to be usable.
    """
    parquet, skips = is_parquet(path), data.on_bad_sample == "skip"
    if data.source == "parquet":
        if not parquet:
            raise DataError(f"{path}: is not a readable Parquet file: it does not begin with PAR1; {files.REPLACE}")
        return
    if whole and (data.source == "text_files" or not (parquet or skips)):
        files.decode(files.read_bytes(path), str(path))
    if data.source == "text_files":
        if codec_of(path) is not None:
            line, origin, _ = next(files.read_lines(path))
            files.whole_row(line, origin)
        return
    first: DataError | None = None
    for number, (line, origin, _) in enumerate(row_lines(path, nested=data.source in NESTED)):
        if number == LOOKED_AT:
            return
        try:
            _check_row(data, line, origin)
            return
        except DataError as error:
            first = first or error
        if not skips:
            break
    if first is not None:
        raise first


def _check_row(data: DataConfig, line: str, origin: str) -> None:
    if data.source == "labelled_jsonl":
        row_of(data, line, origin)
        return
    names = {"pairs_jsonl": ("source_column", "target_column"), **dict.fromkeys(NESTED, ("messages_column",))}.get(
        data.source, ("text_column",)
    )
    row = files.json_row(line, origin, *(getattr(data, name) for name in names))
    if data.source == "chat_jsonl":
        messages_of(row, origin, data.messages_column, data.format)
        return
    if data.source == "preferences_jsonl":
        preference_of(row, origin, data.messages_column)
        return
    for name in names:
        column = getattr(data, name)
        if column not in row:
            raise files.missing_column(origin, f"data.{name}", column, list(row))
