"""``mgpu-pipe submit``: submits one run to the cluster's scheduler and returns."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.config import plugins
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition

MODULES = {"slurm": "slurm.submit_job", "torchrun": "torchrun"}
"""Where each shipped launcher hands a run over, below ``mgpu_pipe.launch``."""
DESCRIPTION = (
    "Compose and check a configuration, freeze it into the run's folder, and submit the\n"
    "run as a job (launch=slurm); or print the line by which another scheduler starts it\n"
    "(launch=torchrun). --dry-run prints the job's script and submits nothing."
)
DRY_RUN = "--dry-run"


def submit(words: list[str]) -> int:
    from mgpu_pipe.launch.compositions import check_composition, compose_and_run

    command = ["mgpu-pipe", "submit", *words]

    def job(composition: Composition) -> int:
        from mgpu_pipe.runs.resume_command import CommandLine

        launcher = _launcher(composition.config.launch.type)
        if not composition.errors:
            composition.config = launcher.fit_to_nodes(composition.config)
        config = check_composition(composition)
        alone = [*composition.flags, *composition.overrides]
        command_line = CommandLine(composition.overrides, command, alone, composition.swept, composition.local_options)
        launcher.hand_over(config, command_line, dry_run=DRY_RUN in words)
        return EXIT_OK

    if "-m" in words or "--multirun" in words:
        raise BadInputError("mgpu-pipe submit: submits one run; for a sweep use mgpu-pipe -m hydra/launcher=slurm ...")
    return compose_and_run("submit [--dry-run]", DESCRIPTION, [word for word in words if word != DRY_RUN], job)


def _launcher(name: str) -> Any:
    """The launcher's module: ``fit_to_nodes(config)`` is what the nodes run, ``hand_over`` submits it."""
    if name == "local":
        others = [other for other in plugins.LAUNCHERS if other != "local"]
        fix = f"use launch={' or launch='.join(others)}"
        raise ConfigError("launch.type", name, fix, "submit hands runs to a scheduler")
    if name in plugins.LAUNCHERS:
        return import_module(f"mgpu_pipe.launch.{MODULES[name]}")
    return plugins.load("launch.type", name, plugins.LAUNCH_GROUP)


VERB = Verb("hand a run to SLURM and return", submit, composes=True)
