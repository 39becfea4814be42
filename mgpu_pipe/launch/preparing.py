"""Progress of data preparation on stderr: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mgpu_pipe.config.hub import is_at_commit
from mgpu_pipe.errors import one_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mgpu_pipe.config.schema import RunConfig
    from mgpu_pipe.data.cache import Progress
    from mgpu_pipe.data.samples import Prepared

SILENT_S = 1.0
"""A stage that is over sooner is not worth a line."""


def prepare_data(config: RunConfig) -> Prepared:
    """The data, and the model's weights where the Hub has them, on this machine.

    Raises:
        BadInputError: they cannot be used as they are.
    """
    from mgpu_pipe.data.prepare import prepare

    fetch_model(config)
    with showing_preparation(config.trainer.progress) as progress:
        prepared = prepare(config, progress)
    if prepared.told:
        print(f"note: {one_line(prepared.told)}", file=sys.stderr, flush=True)
    return prepared


def fetch_model(config: RunConfig) -> None:
    """Have the weights of a model that the Hub has on this machine, whole.

    Raises:
        BadInputError: they cannot be fetched, or are no whole model.
    """
    path = config.model.path
    if path is not None and is_at_commit(path):
        from mgpu_pipe.models.folder import check_model_folder
        from mgpu_pipe.models.hub_folder import whole_folder

        check_model_folder(whole_folder(path))


@contextmanager
def showing_preparation(mode: str) -> Iterator[Progress | None]:
    """The callback for ``prepare``.

    Args:
        mode: ``trainer.progress``.
    """
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
    """One line when a stage takes long, one when it is done."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = 0.0
        self._said = False

    def tell(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._said = stage, now, False
        if not self._said and now - self._began > SILENT_S:
            self._said = True
            share = f" ({100 * done // total}%)" if total else ""
            print(f"data: {stage}{share} ...", file=sys.stderr, flush=True)
        if self._said and total and done >= total:
            print(f"data: {stage} done in {now - self._began:.1f} s", file=sys.stderr, flush=True)
            self._stage = ""
