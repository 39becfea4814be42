"""Python API of ``import mgpu_pipe``: the verbs as functions of the command line's words.

Errors are those that the command line prints: a :class:`~mgpu_pipe.errors.ConfigError` with ``key``, ``value``, ``fix``
and ``reason``, several of them as one :class:`~mgpu_pipe.errors.ConfigErrors`, and any other bad input as a
:class:`~mgpu_pipe.errors.BadInputError`. torch is imported only by functions that need a model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.api.run import PathLike, Run, as_exceptions
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError, ConfigErrors, WorkerError, conceal, printable
from mgpu_pipe.system.local_files import expand_home

if TYPE_CHECKING:
    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.config.hydra.compose import Composition


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the typed configuration of ``overrides``; checks keys and types only.

    Args:
        overrides: the command line's words, such as ``["model=llama_tiny", "optimizer.lr=1e-4"]``; also
            ``--config-dir`` and similar flags.

    Raises:
        BadInputError: all errors of the overrides; see the module.
    """
    with as_exceptions():
        composition = _compose(overrides)
        if composition.errors:
            raise ConfigErrors(composition.errors)
        return composition.config


@dataclass(frozen=True)
class Plan:
    """Plan of a run whose configuration can run. Its text is the output of ``mgpu-pipe check``.

    Attributes:
        config: the configuration.
        rows: names and texts: model, data, topology, batch arithmetic.
        notices: warnings that do not stop the run.
    """

    config: RunConfig
    rows: tuple[tuple[str, str], ...]
    notices: tuple[Notice, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows) + 2
        notes = [f"note: {notice.key}: {notice.text}" for notice in self.notices]
        return printable(conceal("\n".join([*notes, *(f"{name:<{width}}{value}" for name, value in self.rows)])))


def check(overrides: Sequence[str] = ()) -> Plan:
    """Compose and check a configuration, without processes and torch; BadInputError has all errors."""
    with as_exceptions():
        return plan(_compose(overrides))


def plan(composition: Composition) -> Plan:
    """Plan of the run of ``composition``; ConfigErrors has all errors of the configuration."""
    from mgpu_pipe.launch.compositions import notices_of
    from mgpu_pipe.report.overview import overview

    notices = notices_of(composition, elsewhere=True)
    return Plan(composition.config, tuple(overview(composition.config, composition.local_options)), tuple(notices))


def train(overrides: Sequence[str] = ()) -> Run:
    """Train like ``mgpu-pipe train``; progress goes to stderr, or below the cell of a notebook.

    An interrupt (Ctrl-C, or a notebook's stop button) saves and ends the run with status ``stopped``.

    Args:
        overrides: overrides of one run; call once for each point of a sweep.

    Returns:
        The run, finished or stopped.

    Raises:
        BadInputError: all errors of the configuration; see the module.
        WorkerError: a process failed; has the message of the first failing rank.
    """
    from mgpu_pipe.launch.compositions import check_composition, launch_composition

    if threading.current_thread() is not threading.main_thread():
        raise BadInputError("train: call it from the main thread, which alone gets the signals that stop a run")
    with as_exceptions(), _environment_of_a_run():
        composition = _compose(overrides)
        check_composition(composition)
        result = launch_composition(composition, ["mgpu_pipe.train", *overrides])
        run = Run(result.folder)
        if result.status == "failed":
            kind = BadInputError if result.exit_code == EXIT_BAD_INPUT else WorkerError
            raise kind(f"{run.error or 'the run failed'} (logs: {RunPaths(run.folder).logs})")
        return run


def open_run(folder: PathLike | None = None) -> Run:
    """Open a run by its folder, or the latest run below ``outputs``; RunFolderError for another folder."""
    from mgpu_pipe.runs.latest import named_or_newest

    with as_exceptions():
        run = Run(named_or_newest(None if folder is None else expand_home(folder), None))
        run.view()
        return run


@dataclass(frozen=True)
class Comparison:
    """Comparison of several runs.

    Attributes:
        runs: the runs, in the order of the arguments.
        apart: for each run its differences from the others, as ``key=value``.
        table: for each run its ``run`` (a folder), ``status``, ``steps``, ``train/loss``, ``val/loss``, the
            objective's headline, ``tokens_per_s``, ``peak_gib`` and ``wall_s``, with NaN if not measured; and
            ``strategies`` of all its attempts. A list of dicts for ``pandas.DataFrame``.
    """

    runs: tuple[Run, ...]
    apart: list[list[str]]
    table: list[dict[str, Any]]

    def show(self) -> None:
        """Print the table like ``mgpu-pipe report``, with the best run marked."""
        from mgpu_pipe.report.run_tables import runs_table

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
            "strategies": view.strategies,
        }
        for view in views
    ]
    return Comparison(opened, differing(views), table)


def _compose(overrides: Sequence[str]) -> Composition:
    """Compose the words of one run."""
    from mgpu_pipe.config.hydra import command_line as hydra_cli
    from mgpu_pipe.import_path import allow_own_classes

    if isinstance(overrides, str):
        raise BadInputError(f"{overrides}: give a list of overrides, one text each: {overrides.split()}")
    allow_own_classes()
    parsed = hydra_cli.parse([str(word) for word in overrides])
    if parsed.help or hydra_cli.asks_hydra(parsed):
        raise BadInputError(f"{' '.join(overrides)}: asks the command line to print something; leave it out")
    composition = hydra_cli.compose_one(parsed)
    if parsed.multirun or composition.multirun:
        raise BadInputError("-m: starts a sweep; call the function once for each run instead")
    return composition


@contextmanager
def _environment_of_a_run() -> Iterator[None]:
    """Sets the variables of the program ``mgpu-pipe`` for itself and its workers, and restores them afterwards."""
    from mgpu_pipe.system.hardware import limit_threads

    before = dict(os.environ)
    limit_threads(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
