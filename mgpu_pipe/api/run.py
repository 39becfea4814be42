"""A run's folder, opened from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mgpu_pipe.api.exceptions import as_exceptions
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.checkpoint.step import Step
    from mgpu_pipe.inference.load import LoadedRun
    from mgpu_pipe.report.run_view import RunView

PathLike: TypeAlias = "str | os.PathLike[str]"


class Run:
    """A run's folder. Everything is read when it is asked for, so that a run which still trains shows its progress.

    Args:
        folder: the run's folder; :func:`open_run` finds and checks it.
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        view = self.view()
        return f"Run({str(self.folder)!r}: {view.status} at step {view.steps:,})"

    def view(self) -> RunView:
        """Everything of its folder that can be read, now; what is broken is named in its ``problems``."""
        from mgpu_pipe.report.run_view import load_run

        with as_exceptions():
            return load_run(RunPaths(self.folder))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration that it was launched with. Somebody else's is data: ``${...}`` in it stays text."""
        from mgpu_pipe.config.freeze import load_untrusted

        with as_exceptions():
            return load_untrusted(RunPaths(self.folder).config)[0]

    @property
    def summary(self) -> dict[str, Any]:
        """How it ended (``summary.json``); empty while it trains."""
        return self.view().summary

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, ``failed``, or ``unfinished``: it still trains, or was killed."""
        return self.view().status

    @property
    def error(self) -> str:
        """Why it failed; empty where it did not."""
        return self.view().error

    @property
    def step(self) -> int:
        """Optimizer steps that it took."""
        return self.view().steps

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

        with as_exceptions():
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
        raw: bool = False,
    ) -> list[str]:
        """The continuation of each prompt, without the prompt; what a model that answers writes for it.

        Encoder-decoder models answer, and those that were trained on conversations.

        Args:
            temperature: 0 always takes the likeliest token; None is 0 for an encoder-decoder model, else 0.8.
            top_k, top_p: draw among the likeliest only; None does not restrict.
            seed: of the draws; a prompt's continuation does not depend on the others.
            step, device: as in :meth:`model`.
            raw: continue the prompt, whatever the model was trained on.

        Raises:
            BadInputError: the model writes no text, or a prompt fills its context.
        """
        with as_exceptions():
            loaded = self._loaded(step, device)
            if not loaded.model.can_generate():
                raise BadInputError(f"{loaded.source}: {type(loaded.model).__name__} does not generate text")
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
                seed=seed,
            )

    def report(self, out: PathLike | None = None) -> Path:
        """Write the report, by default to the run's own ``report.html``; returns its path."""
        from mgpu_pipe.report.html import write_report

        paths = RunPaths(self.folder)
        with as_exceptions():
            return write_report([paths], paths.report if out is None else Path(out))

    def _loaded(self, step: int | None, device: str) -> LoadedRun:
        from mgpu_pipe.checkpoint.layout import step_folder
        from mgpu_pipe.inference.arguments import device_of
        from mgpu_pipe.inference.load import load_run

        with as_exceptions():
            folder = self.folder if step is None else step_folder(RunPaths(self.folder).checkpoints, step)
            newest = self.checkpoints[-1].path if step is None and self.checkpoints else folder
            asked = (newest, device_of(device))
            if self._held is None or self._held[0] != asked:
                self._held = (asked, load_run(folder, asked[1]))
            return self._held[1]

    _held: tuple[tuple[Path, str], LoadedRun] | None = None
    """The model loaded last, and what was asked for."""
