"""What keeps a run from starting from another experiment's, ``run.starts_from``. No torch."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.checks.start import joined
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError


def base_run_errors(config: RunConfig) -> list[ConfigError]:
    """That another source gives weights, or that this command cannot train the base run first."""
    name = config.run.starts_from
    if name is None:
        return []
    gives_weights = config.objective.started_from(Path(name)) is None
    if gives_weights and (config.checkpoint.init_from is not None or config.model.path is not None):
        taken = "checkpoint.init_from" if config.checkpoint.init_from is not None else "model.path"
        return [ConfigError("run.starts_from", name, f"leave it or {taken} out", f"{taken} brings weights too")]
    if config.launch.type != "local" or joined():
        fix = "run that experiment first, and give its folder by checkpoint.init_from"
        return [ConfigError("run.starts_from", name, fix, "one command trains both on this machine alone")]
    return []
