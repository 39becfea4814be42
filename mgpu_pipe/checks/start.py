"""Checks of a run's starting checkpoint, its folder and its cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths, cache_folder
from mgpu_pipe.config.schema import CheckpointConfig, DataConfig, RunConfig, RunOptions
from mgpu_pipe.errors import BadInputError, ConfigError, raised_by
from mgpu_pipe.system.joined_world import joined_processes
from mgpu_pipe.system.local_files import creation_problem, exists, expand_home, is_folder, name_problem, shorten


def base_run_errors(config: RunConfig) -> list[ConfigError]:
    """Errors of ``run.starts_from``: another source of weights, or a launch that cannot train the base run first."""
    name = config.run.starts_from
    if name is None:
        return []
    gives_weights = config.objective.started_from(Path(name)) is None
    if gives_weights and (config.checkpoint.init_from is not None or config.model.path is not None):
        taken = "checkpoint.init_from" if config.checkpoint.init_from is not None else "model.path"
        return [ConfigError("run.starts_from", name, f"leave it or {taken} out", f"{taken} brings weights too")]
    if config.launch.type != "local" or is_joined():
        fix = "run that experiment first, and give its folder by checkpoint.init_from"
        return [ConfigError("run.starts_from", name, fix, "one command trains both on this machine alone")]
    return []


def check_start(checkpoint: CheckpointConfig) -> None:
    """Check that the run starts from a checkpoint whose files have the recorded sizes."""
    for key, source in (("checkpoint.resume", checkpoint.resume), ("checkpoint.init_from", checkpoint.init_from)):
        if source in (None, "none", "auto") or not exists(expand_home(source)):
            continue  # value_errors reports what does not exist
        if key == "checkpoint.init_from" and (checkpoint.resume == "auto" or _is_model_folder(expand_home(source))):
            continue  # a resumed run does not need it, and a model folder has no step
        from mgpu_pipe.checkpoint.selection import resolve_source

        resolve_source(source, checkpoint.on_corruption, "size", key)


def _is_model_folder(folder: Path) -> bool:
    return exists(folder / "config.json") and not exists(folder / "manifest.json")


def run_folder_errors(run: RunOptions, checkpoint: CheckpointConfig, alone: Sequence[str]) -> list[BadInputError]:
    """Errors of a run folder that cannot be made or belongs to another run; rank 0 of a joined world checks later."""
    if is_joined():
        return []
    key, path_text = ("run.root", run.root) if run.dir is None else ("run.dir", run.dir)
    if not path_text.strip():
        return []  # value_errors reports it
    folder = expand_home(path_text)
    named = {key: path_text, **({"run.name": run.name} if run.dir is None else {})}
    for name, value in named.items():
        if problem := name_problem(value):
            return [ConfigError(name, shorten(value), "shorten it", problem)]
    if exists(folder) and not is_folder(folder):
        return [ConfigError(key, folder, "give another folder", "this is a file")]
    if problem := _writing_problem(folder):
        return [ConfigError(key, folder, "give a folder that can be written", problem)]
    if run.dir is None or not is_folder(folder):
        return []
    from mgpu_pipe.runs.lock import is_held
    from mgpu_pipe.runs.run_folder import refuse_contents

    paths = RunPaths(folder.absolute())
    if is_held(paths.lock):  # the launch waits for the holder or reports it
        return []
    return raised_by(lambda: refuse_contents(paths, checkpoint.resume == "auto", alone))


def cache_errors(data: DataConfig) -> list[BadInputError]:
    """Errors of a cache folder that neither exists nor can be made."""
    folder = cache_folder(data.cache_dir)
    if problem := name_problem(folder):
        return [ConfigError("data.cache_dir", shorten(folder), "shorten it, or set MGPU_PIPE_CACHE", problem)]
    if problem := _writing_problem(folder.absolute()):
        fix = "give a folder that can be written, or set MGPU_PIPE_CACHE"
        return [ConfigError("data.cache_dir", folder, fix, problem)]
    return []


def _writing_problem(folder: Path) -> str:
    """Reason why a folder cannot be written or made there; empty if it can."""
    existing = folder
    while not exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not is_folder(existing):
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written"
    return creation_problem(existing) if existing != folder else ""


def is_joined() -> bool:
    """Whether torchrun or srun started this process as one rank of a world."""
    return joined_processes() is not None
