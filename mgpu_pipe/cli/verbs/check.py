"""``mgpu-pipe check``: composes and validates, prints what would run, and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.cli.verbs import Verb
from mgpu_pipe.errors import EXIT_OK

if TYPE_CHECKING:
    from mgpu_pipe.config.hydra.compose import Composition

DESCRIPTION = "Compose and check a configuration, and print what would run. Starts nothing."


def check(words: list[str]) -> int:
    from mgpu_pipe.api import plan
    from mgpu_pipe.launch.compositions import compose_and_run, print_notices
    from mgpu_pipe.planning.hardware_profile import load_profile

    def job(composition: Composition) -> int:
        for name in composition.config.plan.hardware:
            load_profile(name)  # a run for CPUs reads none
        planned = plan(composition)
        print_notices(planned.notices)
        from mgpu_pipe.report.columns import print_rows

        print_rows(planned.rows)
        return EXIT_OK

    return compose_and_run("check", DESCRIPTION, [_as_list(word) for word in words], job)


def _as_list(word: str) -> str:
    """``plan.hardware=h100`` as ``plan.hardware=[h100]``."""
    key, equals, value = word.partition("=")
    return f"{key}=[{value}]" if key == "plan.hardware" and equals and not value.startswith(("[", "$")) else word


VERB = Verb("print what would run, or its mistakes; start nothing", check, composes=True)
