"""A run's folder, opened from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors, MgpuError, conceal
from mgpu_pipe.system.local_files import is_folder

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.checkpoint.layout import Step
    from mgpu_pipe.inference.open import LoadedRun
    from mgpu_pipe.report.run_view import RunView


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Raises a single error as itself, and removes values of the environment from messages."""
    try:
        yield
    except ConfigErrors as several:
        for error in several.errors:
            error.args = (conceal(str(error)),)
        if len(several.errors) == 1:
            raise several.errors[0] from None
        raise ConfigErrors(several.errors) from None
    except MgpuError as error:
        error.args = (conceal(str(error)),)
        raise


PathLike: TypeAlias = "str | os.PathLike[str]"


class Run:
    """A run's folder. Every property reads it anew, so a running run shows its progress.

    Args:
        folder: the run's folder; :func:`open_run` finds and checks it.
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        view = self.view()
        return f"Run({str(self.folder)!r}: {view.status} at step {view.steps:,})"

    def view(self) -> RunView:
        """Present content of the folder; ``problems`` names unreadable files."""
        from mgpu_pipe.report.run_view import load_run

        with as_exceptions():
            return load_run(RunPaths(self.folder))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of its launch; in another user's run ``${...}`` stays text."""
        from mgpu_pipe.config.freeze import load_untrusted

        with as_exceptions():
            return load_untrusted(RunPaths(self.folder).config)[0]

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``; empty while it trains."""
        return self.view().summary

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished`` (still training, or killed)."""
        return self.view().status

    @property
    def error(self) -> str:
        """Reason why it failed; empty if it did not."""
        return self.view().error

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.view().steps

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of ``metrics.csv``, with a value per row and NaN for an empty cell.

        ``step`` is int64 and counts from 1, all others are float64: ``train/loss``, ``lr``, ``val/loss``, ...
        """
        import numpy as np

        from mgpu_pipe.runs.metrics_file import read_metrics

        columns = read_metrics(RunPaths(self.folder).metrics)
        return {name: np.array(values, np.int64 if name == "step" else np.float64) for name, values in columns.items()}

    @property
    def checkpoints(self) -> list[Step]:
        """Committed checkpoints, the earliest first; checks file sizes, not bytes."""
        from mgpu_pipe.checkpoint import layout
        from mgpu_pipe.checkpoint.inventory import inspect_step

        steps = layout.committed_steps(RunPaths(self.folder).checkpoints)
        return [inspect_step(step, folder, "size") for step, folder in steps.items()]

    def model(self, step: int | None = None, device: str = "auto") -> PreTrainedModel:
        """The trained model in fp32 and evaluation mode; the same object for the same arguments.

        Args:
            step: step of the checkpoint; None for the newest whole one.
            device: ``auto`` (cuda if there is a GPU), ``cpu``, ``cuda``, ``cuda:1``, ...

        Raises:
            BadInputError: no such checkpoint, or it is damaged.
        """
        return self._load(step, device).model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run; BadInputError if it has none."""
        from mgpu_pipe.inference.generation import load_tokenizer

        with as_exceptions():
            folder = RunPaths(self.folder).tokenizer
            if not is_folder(folder):
                raise BadInputError(f"{self.folder}: keeps no tokenizer; give a run on texts")
            return load_tokenizer(folder)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = 50,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        step: int | None = None,
        device: str = "auto",
        raw: bool = False,
    ) -> list[str]:
        """Continuation of each prompt; or its answer, by encoder-decoders and models trained on conversations.

        Args:
            temperature: 0 always takes the likeliest token; None is 0 for an encoder-decoder model, else 0.8.
            top_k, top_p, min_p: draw among the likeliest only; None does not restrict.
            stop: text, or several, before which an answer ends.
            seed: seed of the draws; continuations do not depend on other prompts.
            step, device: as in :meth:`model`.
            raw: continue the prompt even if the model answers.

        Raises:
            BadInputError: the model writes no text, or a prompt fills its context.
        """
        with as_exceptions():
            loaded = self._load(step, device)
            if not loaded.model.can_generate():
                raise BadInputError(
                    f"{loaded.source}: {type(loaded.model).__name__} does not generate text; use mgpu-pipe eval"
                )
            from mgpu_pipe.inference.generation import generate_text

            return generate_text(
                loaded.model,
                loaded.tokenizer(),
                [prompts] if isinstance(prompts, str) else prompts,
                chat=None if raw or loaded.model.config.is_encoder_decoder else loaded.chat(),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                stop=[stop] if isinstance(stop, str) else stop,
                seed=seed,
            )

    def report(self, out: PathLike | None = None) -> Path:
        """Write the report, by default to the run's ``report.html``; returns its path."""
        from mgpu_pipe.report.html import write_report

        paths = RunPaths(self.folder)
        with as_exceptions():
            return write_report([paths], paths.report if out is None else Path(out))

    def _load(self, step: int | None, device: str) -> LoadedRun:
        from mgpu_pipe.checkpoint.layout import step_folder
        from mgpu_pipe.inference.model_arguments import resolve_device
        from mgpu_pipe.inference.open import load_run

        with as_exceptions():
            folder = self.folder if step is None else step_folder(RunPaths(self.folder).checkpoints, step)
            newest = self.checkpoints[-1].path if step is None and self.checkpoints else folder
            source = (newest, resolve_device(device))
            if self._cached_model is None or self._cached_model[0] != source:
                self._cached_model = (source, load_run(folder, source[1]))
            return self._cached_model[1]

    _cached_model: tuple[tuple[Path, str], LoadedRun] | None = None
    """The model loaded last, with its checkpoint and device."""
