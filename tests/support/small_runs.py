"""A run folder of a small configuration, trained by some processes of the tests, as a launch would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.freeze import freeze, remember
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from tests.support.processes import run_processes

Composed = Callable[..., RunConfig]
"""A function of a module: takes the folder for its data, and overrides."""


def trained(composed: Composed, folder: str, overrides: list[str], resume: str | None) -> dict[str, Any]:
    """The metrics of a run, in one of its processes."""
    from mgpu_pipe.training.train import train

    config = composed(Path(folder).parent, *overrides)
    step = None if resume is None else Path(resume)
    return train(config, RunPaths(Path(folder)), prepare(config), resume=step).summary["metrics"]


def run(
    composed: Composed,
    folder: Path,
    processes: int,
    *overrides: str,
    resume: Path | None = None,
    trained: Callable[..., Any] = trained,
) -> Any:
    """The metrics of a run in the new ``folder``, whose data lies beside it; or what another function gives for it."""
    folder.mkdir()
    given = [*overrides, f"trainer.devices={processes}"]
    config, paths = composed(folder.parent, *given), RunPaths(folder)
    freeze(config, paths.config)
    remember(paths.config)
    tokenizer = prepare(config).tokenizer_folder
    if tokenizer is not None:
        shutil.copytree(tokenizer, paths.tokenizer)
    step = None if resume is None else str(resume)
    return run_processes(processes, trained, composed, str(folder), given, step)[0]


def run_on(composed: Composed, folder: Path, *words: str) -> tuple[dict[str, float], dict[str, float], Path]:
    """The metrics of a run of one process, those of the same run that began under fsdp and went on under tp (in
    ``folder / "second"``), and the step from which it went on."""
    whole = run(composed, folder / "whole", 1, "strategy=single", *words)
    saves = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    run(composed, folder / "first", 2, "strategy=fsdp", *saves, *words)
    saved = folder / "first" / "checkpoints" / "step-00000002"
    return whole, run(composed, folder / "second", 2, "strategy=tp", *words, resume=saved), saved


def run_moved(
    composed: Composed, folder: Path, equal: str | None = None, words: tuple[str, ...] = ()
) -> dict[str, float]:
    """The metrics of the run that went on under other strategies (:func:`run_on`), once they are those of one process.

    Args:
        equal: a metric that is the same, to the last bit.
        words: overrides of all runs.
    """
    whole, metrics, _ = run_on(composed, folder, *words)
    for key in ("train/loss", "val/loss"):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-5), "the same samples, changed the same way"
    assert equal is None or metrics[equal] == whole[equal]
    return metrics
