"""``mgpu-pipe verify``: the parity certificate of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition

DESCRIPTION = (
    "Run a small copy of the configuration on its topology, as CPU processes, and\n"
    "in one plain process; compare loss, gradients and weights. Exit code 1 where a\n"
    "bound is broken."
)


def verify(words: list[str]) -> int:
    from mgpu_pipe.launch.compositions import check_composition, compose_and_run

    def job(composition: Composition) -> int:
        config = check_composition(composition, elsewhere=True, trains=False)  # what is verified is smaller
        from mgpu_pipe.verify.driver import verify

        return verify(config, composition.overrides)

    return compose_and_run("verify", DESCRIPTION, words, job)


VERB = Verb("prove that the configuration computes what one plain process does", verify, composes=True)
