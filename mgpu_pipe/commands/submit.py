"""``mgpu-pipe submit``: hands one run to the cluster's scheduler and returns. Without torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.commands import Verb
from mgpu_pipe.errors import EXIT_OK, BadInputError, ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition

DESCRIPTION = (
    "Compose and check a configuration, freeze it into the run's folder, and submit the\n"
    "run as a job (launch=slurm). --dry-run prints the job's script and submits nothing."
)
DRY_RUN = "--dry-run"


def submit(words: list[str]) -> int:
    from mgpu_pipe.launch.composed import checked, composed

    command = ["mgpu-pipe", "submit", *words]
    dry_run = DRY_RUN in words

    def job(composition: Composition) -> int:
        from mgpu_pipe.launch import slurm
        from mgpu_pipe.runs.continue_line import Asked

        launcher = composition.config.launch.type
        if launcher != "slurm":
            raise ConfigError("launch.type", launcher, "use launch=slurm", "submit hands runs to a scheduler")
        if not composition.errors:
            composition.config = slurm.settled(composition.config)
        config = checked(composition)
        if dry_run:
            from mgpu_pipe.launch.slurm_script import batch_script

            run = config.run
            folder = Path(run.dir or f"{run.root}/{run.name}/<date>_<time>-<hash>").expanduser().absolute()
            print(batch_script(config, folder, run.name, command), end="")
            return EXIT_OK
        alone = [*composition.flags, *composition.overrides]
        asked = Asked(composition.overrides, command, alone, composition.swept, composition.own)
        done = slurm.submit(config, asked)
        print(f"follow: tail -F {shlex.quote(str(done.folder))}/logs/slurm-{done.job}.log", file=sys.stderr)
        print(f"cancel: scancel {done.job}", file=sys.stderr)
        print(f"resume: sbatch {shlex.quote(str(done.folder / slurm.SCRIPT))}", file=sys.stderr)
        print(f"job: {done.job}")
        print(f"run: {done.folder}", flush=True)
        return EXIT_OK

    if "-m" in words or "--multirun" in words:
        raise BadInputError("mgpu-pipe submit: submits one run; a sweep is mgpu-pipe -m hydra/launcher=slurm ...")
    return composed("submit [--dry-run]", DESCRIPTION, [word for word in words if word != DRY_RUN], job)


VERB = Verb("hand a run to SLURM and return", submit, composes=True)
