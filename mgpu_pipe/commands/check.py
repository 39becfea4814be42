"""``mgpu-pipe check``: composes and validates, prints what would run, and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.commands import Verb
from mgpu_pipe.errors import EXIT_OK

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition

DESCRIPTION = "Compose and check a configuration, and print what would run. Starts nothing."


def check(words: list[str]) -> int:
    from mgpu_pipe.api import plan
    from mgpu_pipe.launch.composed import composed, tell

    def job(composition: Composition) -> int:
        planned = plan(composition)
        tell(planned.notices)
        from mgpu_pipe.report.rows import print_rows

        print_rows(planned.rows)
        return EXIT_OK

    return composed("check", DESCRIPTION, words, job)


VERB = Verb("say what would run, or what is wrong with it; start nothing", check, composes=True)
