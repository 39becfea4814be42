"""``metrics.csv``: one row a logged step, written so that a killed process loses no row and leaves no half one.

A row is one ``write`` of one whole line, so it reaches the kernel or it does not; :meth:`MetricsWriter.sync`
brings it to the disk and is called before the manifest of its step is written. Power loss can still tear the end
of the file: readers skip rows that are not whole, and :func:`truncate_after` and the writer cut them.
No torch here: the launcher and the report read this file too.
"""

from __future__ import annotations

import csv
import io
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mgpu_pipe.config.plain_files import MAX_TABLE_BYTES, NotPlainError, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import RunFolderError

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
"""Of a run of the default objective."""

Number = float | int | None


class MetricsWriter:
    """Appends rows to a metrics file; creates it with its header, or continues one that an earlier attempt left.

    A file of another set of columns is rewritten with the columns of both, the new ones empty in old rows.

    Args:
        path: the file; its folder exists.
        extra: columns besides ``columns``, such as a callback's metrics.

    Raises:
        RunFolderError: the file cannot be written.
    """

    def __init__(self, path: Path, extra: Sequence[str] = (), columns: Sequence[str] = METRIC_COLUMNS) -> None:
        self.path = path
        self.columns: list[str] = []
        self._known: frozenset[str] = frozenset()
        self._descriptor = -1
        self._descriptor_lock = threading.Lock()
        """A checkpoint that is written beside training calls :meth:`sync` from a thread of its own."""
        self._open([*columns, *extra])

    def append(self, row: Mapping[str, Number]) -> None:
        """Write one row; columns that ``row`` lacks, or has None for, stay empty.

        Raises:
            ValueError: no ``step``, or a column that the file does not have (see :meth:`widen`).
            RunFolderError: the disk is full or gone; the file ends at the row before.
        """
        if row.get("step") is None or not row.keys() <= self._known:
            unknown = sorted(row.keys() - self._known)
            raise ValueError(f"unknown metric columns {unknown}" if unknown else "a row of metrics needs its step")
        get = row.get
        line = (",".join([_cell(get(name)) for name in self.columns]) + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # only a disk that is nearly full takes part of a line
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            _cut_torn_tail(self._descriptor)
            raise _unwritable(self.path, error) from error

    def widen(self, extra: Sequence[str]) -> None:
        """Add columns, empty in the rows so far. Rewrites the file: for the rare metric that turns up late."""
        if not set(extra) <= self._known:
            with self._descriptor_lock:
                self._close()
                self._open([*self.columns, *extra])

    def sync(self) -> None:
        """Return when every row written so far is on the disk."""
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
    """Columns of a metrics file, in the file's order: floats, NaN where a cell is empty; ``step`` is ints.

    Rows that are not whole (a torn last line) are left out. A file that is missing or empty gives ``{}``.
    """
    columns, rows = _read_rows(path)
    table: dict[str, list[float]] = {}
    for position, name in enumerate(columns):
        parse: Callable[[str], float] = int if name == "step" else _parse
        table[name] = [parse(row[position]) for row in rows]
    return table


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """The steps and finite values of some columns: many files are read several times faster than as whole tables.

    A file that is missing, cannot be read, or has no such column gives none.
    """
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    try:
        content = read_bytes(path, MAX_TABLE_BYTES)
    except (OSError, NotPlainError):
        return found
    header, *lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
    columns = next(csv.reader([header.decode("utf-8", errors="replace")]), [])
    if "step" not in columns:
        return found
    step_at, width = columns.index("step"), len(columns)
    wanted = [(columns.index(name), found[name]) for name in names if name in columns]
    for line in lines:
        cells = line.split(b",")
        if len(cells) != width:
            continue
        try:
            step = int(cells[step_at])
            for at, series in wanted:
                if (cell := cells[at]) and math.isfinite(value := float(cell)):
                    series.append((step, value))
        except ValueError:
            continue
    return found


def truncate_after(path: Path, step: int) -> int:
    """Drop the rows of steps later than ``step``, and rows that are not whole; returns how many steps are kept.

    Called before a resume, so that no step is there twice. The file is replaced at once, or not at all.

    Raises:
        RunFolderError: the file cannot be written.
    """
    columns, rows = _read_rows(path)
    kept = [row for row in rows if int(row[columns.index("step")]) <= step]
    if columns and _render(columns, kept) != path.read_bytes():
        try:
            _replace(path, columns, kept)
        except OSError as error:
            raise _unwritable(path, error) from error
    return len(kept)


def _cell(value: Number) -> str:
    if value is None:
        return ""
    # int() and float() first: the repr of a NumPy scalar names its type
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _parse(cell: str) -> float:
    return float(cell) if cell else float("nan")


def _read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and whole rows as text; ``([], [])`` for a file that is missing or has no whole header."""
    try:
        content = read_bytes(path, MAX_TABLE_BYTES)
    except FileNotFoundError:
        return [], []
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace").replace("\0", "")
    lines = csv.reader(io.StringIO(text, newline=""))
    columns = next(lines, [])
    if "step" not in columns:
        return [], []
    at = columns.index("step")
    return columns, [row for row in lines if len(row) == len(columns) and _is_whole(row, at)]


def _is_whole(row: list[str], step_at: int) -> bool:
    try:
        int(row[step_at])
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
    """Put a file of these rows in the place of ``path``, on the disk before it can be seen."""
    replace_file(path, _render(columns, rows), flush=True)


def _cut_torn_tail(descriptor: int) -> None:
    """Cut what follows the last newline, so that the next row starts on a line of its own."""
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
    return RunFolderError(f"{path}: cannot write metrics ({error.strerror}); free space or make the folder writable")
