"""Hydra's own keys that mean something in this program, and what to write in the place of those that do not.

Hydra is used to compose and to sweep. It runs no job of its own: it makes no folder for one, sets up no logging and no
environment, and writes no ``.hydra``.
"""

from __future__ import annotations

from hydra.core.override_parser.types import Override

from mgpu_pipe.errors import ConfigError

USED = ("mode", "searchpath")
USED_BY_SWEEPS = ("sweep", "sweeper", "launcher", "callbacks")

LOGS = "leave it out: progress goes to stderr, and each rank's log is logs/rank-*.log of the run's folder"
INSTEAD = {
    "run": "use run.dir=<folder> for this run's folder, or run.root=<folder> for the folder of all runs",
    "output_subdir": "leave it out: a run's folder holds its config.yaml and overrides.txt",
    "job.name": "use run.name=<name>",
    "job.chdir": "leave it out: paths are relative to the folder that the program was started in",
    "job.env_set": "set the variables before the command: NAME=value mgpu-pipe ...",
    "job_logging": LOGS,
    "hydra_logging": LOGS,
    "verbose": LOGS,
    "help": "leave it out; see mgpu-pipe --help",
}


def hydra_key_error(override: Override, multirun: bool) -> ConfigError | None:
    """The error for an override of a key or group below ``hydra`` that nothing would read; None where it is used."""
    written = override.key_or_group
    key = written.replace("/", ".").removeprefix("hydra").lstrip(".")
    first = key.partition(".")[0]
    if first in USED or (first in USED_BY_SWEEPS and multirun):
        return None
    shown = f"~{written}" if override.is_delete() else written
    value = (override.input_line or "").partition("=")[2]
    if first in USED_BY_SWEEPS:
        return ConfigError(shown, value, "add -m, or leave it out", "only a sweep reads it")
    fix = next((fix for prefix, fix in INSTEAD.items() if f"{key}.".startswith(f"{prefix}.")), "leave it out")
    return ConfigError(shown, value, fix, "nothing here reads this key of Hydra's")
