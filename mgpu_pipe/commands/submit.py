"""``mgpu-pipe submit``: hands one run to the cluster's scheduler and returns. Without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mgpu_pipe.commands import Verb
from mgpu_pipe.config import plugins
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition

DESCRIPTION = (
    "Compose and check a configuration, freeze it into the run's folder, and submit the\n"
    "run as a job (launch=slurm); or print the line by which another scheduler starts it\n"
    "(launch=torchrun). --dry-run prints the job's script and submits nothing."
)
DRY_RUN = "--dry-run"


def submit(words: list[str]) -> int:
    from mgpu_pipe.launch.composed import checked, composed

    command = ["mgpu-pipe", "submit", *words]

    def job(composition: Composition) -> int:
        from mgpu_pipe.runs.continue_line import Asked

        launcher = _launcher(composition.config.launch.type)
        if not composition.errors:
            composition.config = launcher.settled(composition.config)
        config = checked(composition)
        alone = [*composition.flags, *composition.overrides]
        asked = Asked(composition.overrides, command, alone, composition.swept, composition.own)
        launcher.hand_over(config, asked, dry_run=DRY_RUN in words)
        return EXIT_OK

    if "-m" in words or "--multirun" in words:
        raise BadInputError("mgpu-pipe submit: submits one run; for a sweep use mgpu-pipe -m hydra/launcher=slurm ...")
    return composed("submit [--dry-run]", DESCRIPTION, [word for word in words if word != DRY_RUN], job)


def _launcher(name: str) -> Any:
    """What hands a run over: a module (of an installed package: an object) with ``settled(config)``, which gives the
    configuration as it holds on the nodes, and ``hand_over(config, asked, dry_run)``, which submits and says so."""
    if name == "local":
        others = [other for other in plugins.LAUNCHERS if other != "local"]
        fix = f"use launch={' or launch='.join(others)}"
        raise ConfigError("launch.type", name, fix, "submit hands runs to a scheduler")
    if name in plugins.LAUNCHERS:
        return import_module(f"mgpu_pipe.launch.{name}")
    return plugins.load("launch.type", name, plugins.LAUNCH_GROUP)


VERB = Verb("hand a run to SLURM and return", submit, composes=True)
