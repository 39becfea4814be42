"""Where a run begins: the checkpoint it starts from, and its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.joined_world import joined_processes
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, raised_by


def check_start(config: RunConfig) -> None:
    """Check that what the run begins from is a checkpoint whose files have their sizes."""
    start = config.checkpoint
    for key, source in (("checkpoint.resume", start.resume), ("checkpoint.init_from", start.init_from)):
        if source in (None, "none", "auto") or not Path(source).expanduser().exists():
            continue  # value_errors reports what does not exist
        if key == "checkpoint.init_from" and (start.resume == "auto" or _is_model_folder(Path(source).expanduser())):
            continue  # a run that goes on needs it no more
        from mgpu_pipe.checkpoint.select import resolve_source

        resolve_source(source, start.on_corruption, "size", key)


def _is_model_folder(folder: Path) -> bool:
    return (folder / "config.json").exists() and not (folder / "manifest.json").exists()


def run_folder_errors(config: RunConfig, alone: Sequence[str]) -> list[BadInputError]:
    """The run's folder can be made and is not another run's; in a joined world rank 0's launch looks itself."""
    if joined():
        return []
    run = config.run
    key, given = ("run.root", run.root) if run.dir is None else ("run.dir", run.dir)
    if not given.strip():
        return []  # said by value_errors
    folder = Path(given).expanduser()
    if folder.exists() and not folder.is_dir():
        return [ConfigError(key, folder, "give another folder", "this is a file")]
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [ConfigError(key, folder, "give a folder that can be written", f"{existing} cannot be written")]
    if run.dir is None or not folder.is_dir():
        return []
    from mgpu_pipe.runs.folder import refuse_contents
    from mgpu_pipe.runs.lock import is_held

    paths = RunPaths(folder.absolute())
    if is_held(paths.lock):  # the launch waits for who holds it, or names them
        return []
    return raised_by(lambda: refuse_contents(paths, config.checkpoint.resume == "auto", alone))


def joined() -> bool:
    """Whether torchrun or srun started this process as one rank of a world."""
    return joined_processes() is not None
