"""Base runs: ``run.starts_from`` names the experiment whose weights a run starts from."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.selection import resolve_source
from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunOptions, TrainerConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors, print_line
from mgpu_pipe.import_path import python_module
from mgpu_pipe.models.fields import model_fields

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition
    from mgpu_pipe.launch.outcome import LaunchResult

KEY = "run.starts_from"
EXPORTED = "exported"
"""Prefix of folders with exported steps, which serve as base model of adapters."""
ROOT_DIGITS = 12


def base_words(run: RunOptions, trainer: TrainerConfig, cache_dir: str | None) -> list[str]:
    """Command line of the run that a run starts from, on the same machine, cache and root folder."""
    words = [f"experiment={run.starts_from}", f"run.root={run.root}", "checkpoint.resume=auto"]
    words += [f"trainer.accelerator={trainer.accelerator}", f"trainer.devices={trainer.devices}"]
    words += [f"trainer.progress={trainer.progress}"]
    return words if cache_dir is None else [*words, f"data.cache_dir={cache_dir}"]


@functools.cache
def check_bases(flags: tuple[str, ...], words: tuple[str, ...], name: str) -> None:
    """Refuse a cycle of runs that start from each other.

    Args:
        flags: Hydra's arguments of the command line.
        words: command line of the base run (:func:`base_words`).
        name: experiment of the base run.

    Raises:
        ConfigError: naming the cycle.
    """
    chain = [name]
    while True:
        config = hydra_cli.compose_one(hydra_cli.parse([*flags, *words])).config
        if config.run.starts_from is None:
            return
        chain.append(config.run.starts_from)
        if chain[-1] in chain[:-1]:
            cycle = " -> ".join(chain[chain.index(chain[-1]) :])
            raise ConfigError(
                KEY, chain[-1], f"remove it from {chain[-2]}", f"the run would start from itself ({cycle})"
            )
        words = tuple(base_words(config.run, config.trainer, config.data.cache_dir))


def _model_folder(run: Path) -> Path:
    """The run's newest step as a Hugging Face folder, the base model of adapters; written once per step."""
    step = resolve_source(run, verify="size", key=KEY)
    folder = run / f"{EXPORTED}-{step.name}-{read_manifest(step).root[:ROOT_DIGITS]}"
    if not (folder / "config.json").is_file():
        command = python_module("mgpu_pipe", "export", str(step), "--out", str(folder))
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def with_base(
    composition: Composition, run: Callable[[Composition, list[str]], LaunchResult]
) -> Composition | LaunchResult:
    """``composition`` with the weights and tokenizer of its base run, which is trained first if missing.

    Args:
        run: trains a composition, or finds it complete.

    Returns:
        The composition; or the base run's result if it did not finish.

    Raises:
        ConfigErrors: errors of the objective with the base run.
    """
    config = composition.config
    if config.run.starts_from is None:
        return composition
    words = base_words(config.run, config.trainer, config.data.cache_dir)
    print_line(f"{KEY}={config.run.starts_from}: mgpu-pipe {' '.join(words)}", file=sys.stderr, flush=True)
    base = hydra_cli.compose_one(hydra_cli.parse([*composition.flags, *words]))
    result = run(base, ["mgpu-pipe", *words])
    if result.status != "finished":
        return result
    folder = result.folder.absolute()
    objective, checkpoint = config.objective.started_from(folder), config.checkpoint
    if objective is None:
        start = folder if config.peft.name == "none" else _model_folder(folder)
        objective, checkpoint = config.objective, replace(checkpoint, init_from=str(start))
    elif errors := objective.model_errors(model_fields(config.model)):
        raise ConfigErrors(errors)
    data, run_options = (
        replace(config.data, tokenizer=str(RunPaths(folder).tokenizer)),
        replace(config.run, starts_from=None),
    )
    composition.config = replace(config, run=run_options, objective=objective, checkpoint=checkpoint, data=data)
    return composition
