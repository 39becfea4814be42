"""The run that another one starts from: ``run.starts_from`` names its experiment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checks.model import model_fields
from mgpu_pipe.config import hydra_cli
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigErrors

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition
    from mgpu_pipe.launch.outcome import LaunchResult

KEY = "run.starts_from"
EXPORTED = "exported"
"""In the folder of the run that adapters are trained on."""


def words_of(config: RunConfig) -> list[str]:
    """The command line of the run that ``config`` starts from: where and on what it runs is the same."""
    trainer, data = config.trainer, config.data
    words = [f"experiment={config.run.starts_from}", f"run.root={config.run.root}", "checkpoint.resume=auto"]
    words += [f"trainer.accelerator={trainer.accelerator}", f"trainer.devices={trainer.devices}"]
    words += [f"trainer.progress={trainer.progress}"]
    return words if data.cache_dir is None else [*words, f"data.cache_dir={data.cache_dir}"]


def _model_folder(run: Path) -> Path:
    """The run's model as a folder of Hugging Face, which adapters name as theirs; written once."""
    folder = run / EXPORTED
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "mgpu_pipe", "export", str(run), "--out", str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def with_base(
    composition: Composition, run: Callable[[Composition, list[str]], LaunchResult]
) -> Composition | LaunchResult:
    """``composition`` with the weights and tokenizer of the run that it starts from, trained first where it is missing.

    Args:
        run: trains a composition, or finds that it is complete.

    Returns:
        What became of that run, where it did not finish.

    Raises:
        ConfigErrors: what the objective refuses of that run.
    """
    config = composition.config
    if config.run.starts_from is None:
        return composition
    words = words_of(config)
    print(f"{KEY}={config.run.starts_from}: mgpu-pipe {' '.join(words)}", file=sys.stderr, flush=True)
    base = hydra_cli.compose_one(hydra_cli.parse([*composition.flags, *words]))
    result = run(base, ["mgpu-pipe", *words])
    if result.status != "finished":
        return result
    folder = result.folder.absolute()
    objective, checkpoint = config.objective.started_from(folder), config.checkpoint
    if objective is None:
        start = folder if config.peft.name == "none" else _model_folder(folder)
        objective, checkpoint = config.objective, replace(checkpoint, init_from=str(start))
    elif refused := objective.model_errors(model_fields(config)):
        raise ConfigErrors(refused)
    data, own = replace(config.data, tokenizer=str(RunPaths(folder).tokenizer)), replace(config.run, starts_from=None)
    composition.config = replace(config, run=own, objective=objective, checkpoint=checkpoint, data=data)
    return composition
