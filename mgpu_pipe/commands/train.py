"""``mgpu-pipe train``: the run; also what overrides without a verb mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.commands import Verb
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import EXIT_STOPPED
from mgpu_pipe.launch.stop import run_begins, run_ended

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition

DESCRIPTION = "Train a model: compose a configuration, check it, and start its processes."


def train(words: list[str]) -> int:
    """Compose once, check, and hand over to the launcher."""
    from mgpu_pipe.launch.composed import checked, composed

    command = ["mgpu-pipe", *words]
    runs: list[RunPaths] = []
    folder: Path | None = None
    """Of the sweep."""

    def job(composition: Composition) -> int:
        nonlocal folder
        folder = composition.sweep_folder
        run_begins()
        checked(composition)
        from mgpu_pipe.api import launched

        result = launched(composition, command)
        run_ended(asked_to_stop=result.asked_to_stop)
        runs.append(RunPaths(result.folder))
        return result.exit_code

    def conclude(code: int) -> None:
        if runs and folder is not None:
            from mgpu_pipe.launch.sweep_end import show_sweep

            show_sweep(runs, folder, words if code == EXIT_STOPPED else ())

    return composed("[train]", DESCRIPTION, words, job, after_sweep=conclude)


VERB = Verb("train; also what overrides without a verb do", train, composes=True)
