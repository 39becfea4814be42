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
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import EXIT_BAD_INPUT, BadInputError, ConfigErrors, MgpuError, WorkerError, concealed

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.checkpoint.step import Step
    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.config.compose import Composition
    from mgpu_pipe.inference.load import LoadedRun
    from mgpu_pipe.launch.outcome import LaunchResult
    from mgpu_pipe.report.run_view import RunView

PathLike: TypeAlias = "str | os.PathLike[str]"


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The typed configuration that ``overrides`` give; nothing of it is checked beyond keys and types.

    Args:
        overrides: the command line's words, such as ``["model=llama_tiny", "optimizer.lr=1e-4"]``; also
            ``--config-dir`` and its like.

    Raises:
        BadInputError: everything that is wrong with them; see the module.
    """
    with _as_exceptions():
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
    with _as_exceptions():
        return plan(_composed(overrides))


def plan(composition: Composition) -> Plan:
    """What the run of ``composition`` would be.

    Raises:
        ConfigErrors: everything that is wrong with it.
    """
    from mgpu_pipe.launch.composed import notices_of
    from mgpu_pipe.report.overview import overview

    told = notices_of(composition)
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
    from mgpu_pipe.launch.composed import checked

    if threading.current_thread() is not threading.main_thread():
        raise BadInputError("train: call it from the main thread, which alone gets the signals that stop a run")
    with _as_exceptions(), _environment_of_a_run():
        composition = _composed(overrides)
        checked(composition)
        result = launched(composition, ["mgpu_pipe.train", *overrides])
        run = Run(result.folder)
        if result.status == "failed":
            kind = BadInputError if result.exit_code == EXIT_BAD_INPUT else WorkerError
            raise kind(f"{run.error or 'the run failed'} (logs: {RunPaths(run.folder).logs})")
        return run


def launched(composition: Composition, command: Sequence[str]) -> LaunchResult:
    """Run a composition that was checked; ``command`` is what the user typed, for the record."""
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.runs.continue_line import Asked

    alone = [*composition.flags, *composition.overrides]
    return launch(composition.config, Asked(composition.overrides, command, alone, composition.swept, composition.own))


class Run:
    """A run's folder. Everything is read when it is asked for, so that a run which still trains shows its progress.

    Args:
        folder: the run's folder; :func:`open_run` finds and checks it.
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        view = self._view()
        return f"Run({str(self.folder)!r}: {view.status} at step {view.steps:,})"

    def _view(self) -> RunView:
        from mgpu_pipe.report.run_view import load_run

        with _as_exceptions():
            return load_run(RunPaths(self.folder))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration that it was launched with. Somebody else's is data: ``${...}`` in it stays text."""
        from mgpu_pipe.config.freeze import load_untrusted

        with _as_exceptions():
            return load_untrusted(RunPaths(self.folder).config)[0]

    @property
    def summary(self) -> dict[str, Any]:
        """How it ended (``summary.json``); empty while it trains."""
        return self._view().summary

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished``: it still trains, or was killed."""
        return self._view().status

    @property
    def error(self) -> str:
        """Why it failed; empty where it did not."""
        return self._view().error

    @property
    def step(self) -> int:
        """Optimizer steps that it took."""
        return self._view().steps

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The columns of ``metrics.csv``, each of as many values as there are rows; NaN where a cell is empty.

        ``step`` is int64 and counts from 1, all others are float64: ``train/loss``, ``lr``, ``val/loss``, ...
        """
        import numpy as np

        from mgpu_pipe.runs.metrics_file import read_metrics

        columns = read_metrics(RunPaths(self.folder).metrics)
        return {name: np.array(values, np.int64 if name == "step" else np.float64) for name, values in columns.items()}

    @property
    def checkpoints(self) -> list[Step]:
        """Its committed checkpoints, the earliest first; their files' sizes are checked, not their bytes."""
        from mgpu_pipe.checkpoint import layout
        from mgpu_pipe.checkpoint.inventory import inspect_step

        steps = layout.committed(RunPaths(self.folder).checkpoints)
        return [inspect_step(step, folder, "size") for step, folder in steps.items()]

    def model(self, step: int | None = None, device: str = "auto") -> PreTrainedModel:
        """The trained model in fp32, in evaluation mode; the same object at every call with the same arguments.

        Args:
            step: of this checkpoint; None: of the newest whole one.
            device: ``auto`` (cuda where there is a GPU), ``cpu``, ``cuda``, ``cuda:1``, ...

        Raises:
            BadInputError: there is no such checkpoint, or it is damaged.
        """
        return self._loaded(step, device).model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that it was trained with.

        Raises:
            BadInputError: it keeps none.
        """
        from mgpu_pipe.inference.generation import load_tokenizer

        with _as_exceptions():
            folder = RunPaths(self.folder).tokenizer
            if not folder.is_dir():
                raise BadInputError(f"{self.folder}: keeps no tokenizer")
            return load_tokenizer(folder)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = 50,
        top_p: float | None = None,
        seed: int = 0,
        step: int | None = None,
        device: str = "auto",
    ) -> list[str]:
        """The continuation of each prompt, without the prompt; what an encoder-decoder model writes for it.

        Args:
            temperature: 0 always takes the likeliest token; None is 0 for an encoder-decoder model, else 0.8.
            top_k, top_p: draw among the likeliest only; None does not restrict.
            seed: of the draws; a prompt's continuation does not depend on the others.
            step, device: as in :meth:`model`.

        Raises:
            BadInputError: the model writes no text, or a prompt fills its context.
        """
        with _as_exceptions():
            loaded = self._loaded(step, device)
            if not loaded.model.can_generate():
                raise BadInputError(f"{loaded.source}: {type(loaded.model).__name__} does not generate text")
            from mgpu_pipe.inference.generation import generate_text

            return generate_text(
                loaded.model,
                loaded.tokenizer(),
                [prompts] if isinstance(prompts, str) else prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
            )

    def report(self, out: PathLike | None = None) -> Path:
        """Write the report, by default to the run's own ``report.html``; returns its path."""
        from mgpu_pipe.report.html import write_report

        paths = RunPaths(self.folder)
        with _as_exceptions():
            return write_report([paths], paths.report if out is None else Path(out))

    def _loaded(self, step: int | None, device: str) -> LoadedRun:
        from mgpu_pipe.checkpoint.layout import step_folder
        from mgpu_pipe.inference.arguments import device_of
        from mgpu_pipe.inference.load import load_run

        with _as_exceptions():
            folder = self.folder if step is None else step_folder(RunPaths(self.folder).checkpoints, step)
            newest = self.checkpoints[-1].path if step is None and self.checkpoints else folder
            asked = (newest, device_of(device))
            if self._held is None or self._held[0] != asked:
                self._held = (asked, load_run(folder, asked[1]))
            return self._held[1]

    _held: tuple[tuple[Path, str], LoadedRun] | None = None
    """The model loaded last, and what was asked for."""


def open_run(folder: PathLike | None = None) -> Run:
    """A run's folder; without one, that of the run begun last below ``outputs``, as the verbs take it.

    Raises:
        RunFolderError: there is no such folder, or it is not a run's.
    """
    from mgpu_pipe.runs.newest import named_or_newest

    with _as_exceptions():
        run = Run(named_or_newest(None if folder is None else Path(folder).expanduser(), None))
        run._view()
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

        with _as_exceptions():
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
    views = [run._view() for run in opened]
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
def _as_exceptions() -> Iterator[None]:
    """One error alone is raised as itself; no message holds a value of the environment."""
    try:
        yield
    except ConfigErrors as several:
        for error in several.errors:
            error.args = (concealed(str(error)),)
        if len(several.errors) == 1:
            raise several.errors[0] from None
        raise ConfigErrors(several.errors) from None
    except MgpuError as error:
        error.args = (concealed(str(error)),)
        raise


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
