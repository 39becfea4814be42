"""What ``import mgpu_pipe`` offers: the verbs as functions, which take the command line's words as a list.

What is wrong is raised as what the command line prints: a :class:`~mgpu_pipe.errors.ConfigError` with ``key``,
``value``, ``fix`` and ``reason``, several of them as one :class:`~mgpu_pipe.errors.ConfigErrors`, anything else that
the user gave as a :class:`~mgpu_pipe.errors.BadInputError`. torch is imported by what needs a model, and by nothing
else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.api.exceptions import as_exceptions
from mgpu_pipe.api.run import PathLike, Run
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError, ConfigErrors, WorkerError, concealed

if TYPE_CHECKING:
    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.config.compose import Composition


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The typed configuration that ``overrides`` give; nothing of it is checked beyond keys and types.

    Args:
        overrides: the command line's words, such as ``["model=llama_tiny", "optimizer.lr=1e-4"]``; also
            ``--config-dir`` and its like.

    Raises:
        BadInputError: everything that is wrong with them; see the module.
    """
    with as_exceptions():
        composition = _composed(overrides)
        if composition.errors:
            raise ConfigErrors(composition.errors)
        return composition.config


@dataclass(frozen=True)
class Plan:
    """What a run would be, of a configuration that can run. Its text is what ``mgpu-pipe check`` prints.

    Attributes:
        config: the configuration.
        rows: names, and what there is to say: model, data, topology, batch arithmetic.
        notices: what is worth knowing and stops nothing.
    """

    config: RunConfig
    rows: tuple[tuple[str, str], ...]
    notices: tuple[Notice, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows) + 2
        notes = [f"note: {notice.key}: {notice.text}" for notice in self.notices]
        return concealed("\n".join([*notes, *(f"{name:<{width}}{value}" for name, value in self.rows)]))


def check(overrides: Sequence[str] = ()) -> Plan:
    """Compose and check everything that can be known before a process starts; start nothing. Without torch.

    Raises:
        BadInputError: everything that is wrong; see the module.
    """
    with as_exceptions():
        return plan(_composed(overrides))


def plan(composition: Composition) -> Plan:
    """What the run of ``composition`` would be.

    Raises:
        ConfigErrors: everything that is wrong with it.
    """
    from mgpu_pipe.launch.composed import notices_of
    from mgpu_pipe.report.overview import overview

    told = notices_of(composition, elsewhere=True)
    return Plan(composition.config, tuple(overview(composition.config, composition.own)), tuple(told))


def train(overrides: Sequence[str] = ()) -> Run:
    """Train as ``mgpu-pipe train`` does: its processes, its folder, its progress (in a notebook, below the cell).

    An interrupt (Ctrl-C, or a notebook's stop button) saves and ends the run, whose status is ``stopped`` then.

    Args:
        overrides: of one run; a sweep is one call for each of its points.

    Returns:
        The run, finished or stopped.

    Raises:
        BadInputError: everything that is wrong with it; see the module.
        WorkerError: its processes failed; the message is the first failing rank's.
    """
    from mgpu_pipe.launch.composed import checked, launched

    if threading.current_thread() is not threading.main_thread():
        raise BadInputError("train: call it from the main thread, which alone gets the signals that stop a run")
    with as_exceptions(), _environment_of_a_run():
        composition = _composed(overrides)
        checked(composition)
        result = launched(composition, ["mgpu_pipe.train", *overrides])
        run = Run(result.folder)
        if result.status == "failed":
            kind = BadInputError if result.exit_code == EXIT_BAD_INPUT else WorkerError
            raise kind(f"{run.error or 'the run failed'} (logs: {RunPaths(run.folder).logs})")
        return run


def open_run(folder: PathLike | None = None) -> Run:
    """A run's folder; without one, that of the run begun last below ``outputs``, as the verbs take it.

    Raises:
        RunFolderError: there is no such folder, or it is not a run's.
    """
    from mgpu_pipe.runs.newest import named_or_newest

    with as_exceptions():
        run = Run(named_or_newest(None if folder is None else Path(folder).expanduser(), None))
        run.view()
        return run


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        runs: as they were given.
        apart: for each run what sets it apart from the others, as ``key=value``.
        table: for each run its ``run`` (a folder), ``status``, ``steps``, ``train/loss``, ``val/loss``, the
            objective's headline, ``tokens_per_s``, ``peak_gib`` and ``wall_s``; NaN where it was not measured. A list
            of dicts, which ``pandas.DataFrame`` takes.
    """

    runs: tuple[Run, ...]
    apart: list[list[str]]
    table: list[dict[str, Any]]

    def show(self) -> None:
        """Print the table, the best run marked, as ``mgpu-pipe report`` does."""
        from mgpu_pipe.report.tables import runs_table

        runs_table([RunPaths(run.folder) for run in self.runs])

    def report(self, out: PathLike) -> Path:
        """Write the comparison as one HTML file; returns its path."""
        from mgpu_pipe.report.html import write_report

        with as_exceptions():
            return write_report([RunPaths(run.folder) for run in self.runs], Path(out))


def compare(*runs: Run | PathLike) -> Comparison:
    """Compare runs.

    Args:
        runs: runs, or their folders.

    Raises:
        RunFolderError: a folder is not a run's.
    """
    from mgpu_pipe.report.run_view import differing

    opened = tuple(run if isinstance(run, Run) else open_run(run) for run in runs)
    views = [run.view() for run in opened]
    table = [
        {
            "run": view.paths.root,
            "status": view.status,
            "steps": view.steps,
            "train/loss": view.final("train/loss"),
            "val/loss": view.final("val/loss"),
            view.objective.headline.key: view.headline,
            "tokens_per_s": view.tokens_per_s,
            "peak_gib": view.peak_gib,
            "wall_s": view.wall_s,
        }
        for view in views
    ]
    return Comparison(opened, differing(views), table)


def _composed(overrides: Sequence[str]) -> Composition:
    """Compose the words of one run."""
    from mgpu_pipe.config import hydra_cli
    from mgpu_pipe.launch.composed import find_own_classes

    if isinstance(overrides, str):
        raise BadInputError(f"{overrides}: give a list of overrides, one text each: {overrides.split()}")
    find_own_classes()
    parsed = hydra_cli.parse([str(word) for word in overrides])
    if parsed.help or hydra_cli.asks_hydra(parsed):
        raise BadInputError(f"{' '.join(overrides)}: asks the command line to print something; leave it out")
    composition = hydra_cli.compose_one(parsed)
    if parsed.multirun or composition.multirun:
        raise BadInputError("-m: a sweep is one call for each of its runs")
    return composition


@contextmanager
def _environment_of_a_run() -> Iterator[None]:
    """What the program ``mgpu-pipe`` sets for itself and its workers, and nothing of it afterwards."""
    from mgpu_pipe.config.threads import limit_threads

    before = dict(os.environ)
    limit_threads(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
