"""``mgpu-pipe train``, also the verb of overrides without a verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.launch.signals import run_begins

if TYPE_CHECKING:
    from argparse import Namespace

    from mgpu_pipe.config.hydra.compose import Composition

DESCRIPTION = "Train a model: compose a configuration, check it, and start its processes."


def train(words: list[str]) -> int:
    """Compose and check a configuration and launch it; or start a sweep."""
    from mgpu_pipe.launch.compositions import check_composition, compose_and_run, launch_composition

    command = ["mgpu-pipe", *words]

    def job(composition: Composition) -> int:
        run_begins()
        check_composition(composition, joins=True)
        return launch_composition(composition, command).exit_code

    def sweep(parsed: Namespace) -> int:
        from mgpu_pipe.sweep.start_sweep import start

        return start(parsed, words)

    return compose_and_run("[train]", DESCRIPTION, words, job, sweep)


VERB = Verb("train; also what overrides without a verb do", train, composes=True)
