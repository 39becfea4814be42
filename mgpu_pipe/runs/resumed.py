"""Configuration of the run that another configuration resumes, read before its folder is chosen."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.run_identity import differences
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.runs.latest import runs_in


def resumable_folders(config: RunConfig) -> list[Path]:
    """Runs, or the step, that ``config`` may resume; the latest first."""
    resume, run = config.checkpoint.resume, config.run
    if resume not in ("none", "auto"):
        return [Path(resume).expanduser()]
    if run.dir is not None:
        return [Path(run.dir).expanduser()] if resume == "auto" else []
    return runs_in(Path(run.root).expanduser() / run.name) if resume == "auto" else []


def resumed_config(config: RunConfig) -> RunConfig | None:
    """Configuration of the run that ``config`` resumes; None for a new run."""
    is_searched = config.run.dir is None and config.checkpoint.resume == "auto"
    for folder in resumable_folders(config):
        try:
            before, _ = load_untrusted(RunPaths(folder).config)
        except BadInputError:
            continue
        if not (is_searched and differences(config, before)):
            return before
    return None
