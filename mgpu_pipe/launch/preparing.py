"""Prepares data with progress on stderr: a bar on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from mgpu_pipe.config.hub import is_at_commit
from mgpu_pipe.errors import one_line, print_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mgpu_pipe.config.schema import ModelConfig, RunConfig
    from mgpu_pipe.data.cache import Progress
    from mgpu_pipe.data.samples import Prepared


_REDRAW = re.compile(r"(\r\n|\n|\r|\x1b\[[0-9]*[KA])")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PlainLines:
    """Converts terminal output to log lines, without the redraws of a bar."""

    def __init__(self) -> None:
        self._line = ""

    def feed(self, text: str) -> str:
        """Lines completed by ``text``."""
        done = []
        for piece in _REDRAW.split(text):
            if piece in ("\n", "\r\n"):
                done.append(self._line + "\n")
                self._line = ""
            elif _REDRAW.fullmatch(piece):  # back to the line's start, or erased
                self._line = ""
            else:
                self._line += _ESCAPES.sub("", piece)
        return "".join(done)


class LiveStream(io.TextIOBase):
    """A text stream that writes to the launcher's standard error and, as plain lines, to the rank's log.

    Args:
        log: the rank's standard error.
        fd: a descriptor of the launcher's standard error.
    """

    encoding = "utf-8"

    def __init__(self, log: TextIO, fd: int) -> None:
        self._log, self._fd = log, fd
        self._plain = PlainLines()
        self._live_open = True

    def write(self, text: str) -> int:
        lines = self._plain.feed(text)
        with suppress(OSError):  # on a full disk, saving a checkpoint reports the error
            self._log.write(lines)
        data = text.encode("utf-8", "replace")
        try:
            while self._live_open and data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._live_open = False  # the terminal or the pipe's reader is gone; training continues
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True


SILENT_S = 1.0
"""A shorter stage prints no line."""


def prepare_data(config: RunConfig) -> Prepared:
    """Prepare the data, and fetch a model from the Hub, on this machine; BadInputError if that fails."""
    from mgpu_pipe.data.prepare_data import prepare

    fetch_model(config.model)
    with showing_preparation(config.trainer.progress) as progress:
        prepared = prepare(config, progress)
    for note in (prepared.told, prepared.too_long(config.data)):
        if note:
            print_line(f"note: {one_line(note)}", file=sys.stderr, flush=True)
    return prepared


def fetch_model(model: ModelConfig) -> None:
    """Fetch the whole model from the Hub to this machine; BadInputError if weights are missing."""
    path = model.path
    if path is not None and is_at_commit(path):
        from mgpu_pipe.models.weights.folder import check_model_folder, whole_folder

        check_model_folder(whole_folder(path))


@contextmanager
def showing_preparation(mode: str) -> Iterator[Progress | None]:
    """Progress callback for ``prepare`` by ``trainer.progress``."""
    if mode == "off":
        yield None
    elif mode == "bar" or (mode == "auto" and sys.stderr.isatty()):
        with _bar() as tell:
            yield tell
    else:
        yield _Lines().tell


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"data: {stage}", total=total or None)
            bar.update(tasks[stage], completed=done, total=total or None)

        yield tell


class _Lines:
    """Prints a line when a stage takes long, and one when it is done."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = 0.0
        self._announced = False

    def tell(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._announced = stage, now, False
        if not self._announced and now - self._began > SILENT_S:
            self._announced = True
            share = f" ({100 * done // total}%)" if total else ""
            print_line(f"data: {stage}{share} ...", file=sys.stderr, flush=True)
        if self._announced and total and done >= total:
            print_line(f"data: {stage} done in {now - self._began:.1f} s", file=sys.stderr, flush=True)
            self._stage = ""
