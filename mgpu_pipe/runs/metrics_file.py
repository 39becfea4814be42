"""``metrics.csv``: one row per logged step; a killed process neither loses a row nor leaves half a row.

A row is one ``write`` of one whole line. :meth:`MetricsWriter.sync` flushes it to disk before the manifest of its step
is written. Power loss can still tear the end of the file: readers skip incomplete rows, and :func:`truncate_after` and
the writer cut them.
"""

from __future__ import annotations

import csv
import io
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.system.local_files import MAX_TABLE_BYTES, NotPlainError, fix_of_writing, read_bytes, replace_file

STEP_COLUMNS = (
    "step",
    "train/loss",
    "train/grad_norm",
    "lr",
    "throughput/tokens_per_s",
    "throughput/samples_per_s",
    "throughput/padding",
    "throughput/step_s",
    "throughput/mfu",
    "memory/peak_gib",
)
METRIC_COLUMNS = (*STEP_COLUMNS, "val/loss", "val/perplexity")
"""Columns of a run with the default objective."""

Number = float | int | None


class MetricsWriter:
    """Appends rows to a metrics file, which it creates with its header or continues from an earlier attempt.

    A file with other columns is rewritten with the columns of both; new columns are empty in old rows.

    Args:
        path: the file; its folder exists.
        extra: columns next to ``columns``, such as a callback's metrics.

    Raises:
        RunFolderError: the file cannot be written.
    """

    def __init__(self, path: Path, extra: Sequence[str] = (), columns: Sequence[str] = METRIC_COLUMNS) -> None:
        self.path = path
        self.columns: list[str] = []
        self._known: frozenset[str] = frozenset()
        self._descriptor = -1
        self._descriptor_lock = threading.Lock()
        """Guards the descriptor: a background checkpoint calls :meth:`sync` from its thread."""
        self._open([*columns, *extra])

    def append(self, row: Mapping[str, Number]) -> None:
        """Write one row; columns missing or None in ``row`` stay empty.

        Raises:
            ValueError: no ``step``, or a column that the file does not have (see :meth:`widen`).
            RunFolderError: the disk is full or gone; the file ends at the previous row.
        """
        if row.get("step") is None or not row.keys() <= self._known:
            unknown = sorted(row.keys() - self._known)
            raise ValueError(f"unknown metric columns {unknown}" if unknown else "a row of metrics needs its step")
        get = row.get
        line = (",".join([_cell(get(name)) for name in self.columns]) + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # only an almost full disk writes part of a line
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            _cut_torn_tail(self._descriptor)
            raise _unwritable(self.path, error) from error

    def widen(self, extra: Sequence[str]) -> None:
        """Add columns, empty in previous rows. Rewrites the file, for the rare metric that appears late."""
        if not set(extra) <= self._known:
            with self._descriptor_lock:
                self._close()
                self._open([*self.columns, *extra])

    def sync(self) -> None:
        """Flush every written row to disk."""
        try:
            with self._descriptor_lock:
                os.fsync(self._descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._descriptor_lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, wanted: Sequence[str]) -> None:
        for name in wanted:
            if not name or any(ord(character) < 32 for character in name):
                raise ValueError(f"{name!r} cannot be the name of a metric column")
        try:
            header, rows = _read_rows(self.path)
            self.columns = list(dict.fromkeys([*header, *wanted]))
            if self.columns != header:
                _replace(self.path, self.columns, [[*row, *[""] * (len(self.columns) - len(row))] for row in rows])
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            _cut_torn_tail(self._descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._known = frozenset(self.columns)


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Columns of a metrics file, NaN for an empty cell, ``step`` as ints; skips torn rows, ``{}`` without a file."""
    columns, rows = _read_rows(path)
    table: dict[str, list[float]] = {}
    for position, name in enumerate(columns):
        parse: Callable[[str], float] = int if name == "step" else _parse
        table[name] = [parse(row[position]) for row in rows]
    return table


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Steps and finite values of columns, faster than whole tables; empty without file or column."""
    series_by_name: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    try:
        content = read_bytes(path, MAX_TABLE_BYTES)
    except (OSError, NotPlainError):
        return series_by_name
    header, *lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
    columns = next(csv.reader([header.decode("utf-8", errors="replace")]), [])
    if "step" not in columns:
        return series_by_name
    step_column, width = columns.index("step"), len(columns)
    wanted = [(columns.index(name), series_by_name[name]) for name in names if name in columns]
    for line in lines:
        cells = line.split(b",")
        if len(cells) != width:
            continue
        try:
            step = int(cells[step_column])
            for column, series in wanted:
                if (cell := cells[column]) and math.isfinite(value := float(cell)):
                    series.append((step, value))
        except ValueError:
            continue
    return series_by_name


def truncate_after(path: Path, step: int) -> int:
    """Drop incomplete rows and rows of steps after ``step``; returns the number of remaining steps.

    Called before a resume, so that no step appears twice. The file is replaced atomically.

    Raises:
        RunFolderError: the file cannot be written.
    """
    columns, rows = _read_rows(path)
    remaining = [row for row in rows if int(row[columns.index("step")]) <= step]
    if columns and _render(columns, remaining) != path.read_bytes():
        try:
            _replace(path, columns, remaining)
        except OSError as error:
            raise _unwritable(path, error) from error
    return len(remaining)


def _cell(value: Number) -> str:
    if value is None:
        return ""
    # int() and float(), because the repr of a NumPy scalar names its type
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _parse(cell: str) -> float:
    return float(cell) if cell else float("nan")


def _read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and whole rows as text; ``([], [])`` without a file or a whole header."""
    try:
        content = read_bytes(path, MAX_TABLE_BYTES)
    except FileNotFoundError:
        return [], []
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace").replace("\0", "")
    lines = csv.reader(io.StringIO(text, newline=""))
    columns = next(lines, [])
    if "step" not in columns:
        return [], []
    step_column = columns.index("step")
    return columns, [row for row in lines if len(row) == len(columns) and _is_whole(row, step_column)]


def _is_whole(row: list[str], step_column: int) -> bool:
    try:
        int(row[step_column])
        for cell in row:
            _parse(cell)
    except ValueError:
        return False
    return True


def _render(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().encode()


def _replace(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Replace ``path`` by a file of these rows, flushed to disk first."""
    replace_file(path, _render(columns, rows), flush=True)


def _cut_torn_tail(descriptor: int) -> None:
    """Cut everything after the last newline, so that the next row starts a line."""
    size = os.fstat(descriptor).st_size
    end, block = size, 4096
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    fix = fix_of_writing(str(error), "free space or make the folder writable")
    return RunFolderError(f"{path}: cannot write metrics ({error.strerror}); {fix}")


RANK_COLUMNS = ("step", "data_s", "cpu_s", "peak_gib")
"""Columns of a rank's file: seconds of waiting for the batch, CPU seconds, and peak memory as in ``metrics.csv``."""


def rank_writer(paths: RunPaths, rank: int, world_size: int, start_step: int) -> MetricsWriter | None:
    """Writer of this rank's file; None with one process. Drops rows after ``start_step``.

    Rank 0 also drops them from the files of ranks of earlier, larger attempts.

    Raises:
        RunFolderError: the file cannot be written.
    """
    if rank == 0:
        for file in paths.logs.glob("rank-*.csv"):
            number = file.stem.removeprefix("rank-")
            if world_size == 1 or (number.isdecimal() and int(number) >= world_size):
                truncate_after(file, start_step)
    if world_size == 1:
        return None
    file_of_rank = paths.rank_metrics(rank)
    file_of_rank.parent.mkdir(parents=True, exist_ok=True)
    if file_of_rank.exists():
        truncate_after(file_of_rank, start_step)
    return MetricsWriter(file_of_rank, columns=RANK_COLUMNS)


def read_ranks(paths: RunPaths, most: int) -> dict[int, dict[str, list[float]]]:
    """Columns of the first ``most`` ranks that have a file; NotPlainError or OSError for a bad file."""
    tables = ((rank, read_metrics(paths.rank_metrics(rank))) for rank in range(most))
    return {rank: columns for rank, columns in tables if columns}
