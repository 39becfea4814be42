"""Configuration of the run that another configuration resumes, read before its folder is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig, RunOptions
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.runs.latest import HASH_DIGITS, find_own, runs_in
from mgpu_pipe.system.local_files import expand_home


def resumable_folders(run: RunOptions, checkpoint: CheckpointConfig) -> list[Path]:
    """Runs, or the step, that ``config`` may resume; the latest first."""
    resume = checkpoint.resume
    if resume not in ("none", "auto"):
        return [expand_home(resume)]
    if run.dir is not None:
        return [expand_home(run.dir)] if resume == "auto" else []
    return runs_in(expand_home(run.root) / run.name) if resume == "auto" else []


def resumed_config(config: RunConfig, swept: Sequence[str] = ()) -> RunConfig | None:
    """Configuration of the run that ``config`` resumes; None for a new run.

    Args:
        swept: see :func:`mgpu_pipe.runs.run_folder.choose_folder`, which takes the same run.
    """
    folders = resumable_folders(config.run, config.checkpoint)
    if config.run.dir is None and config.checkpoint.resume == "auto":
        runs = expand_home(config.run.root) / config.run.name
        latest, _ = find_own(config, runs, mathematics_hash(config, HASH_DIGITS), swept)
        folders = [] if latest is None else [latest]
    for folder in folders:
        try:
            return load_untrusted(RunPaths(folder).config)[0]
        except BadInputError:
            continue
    return None
