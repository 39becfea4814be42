"""``mgpu-pipe check``: composes and validates, prints what would run, and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.commands import Verb
from mgpu_pipe.errors import EXIT_OK, concealed

if TYPE_CHECKING:
    from mgpu_pipe.config.compose import Composition

DESCRIPTION = "Compose and check a configuration, and print what would run. Starts nothing."


def check(words: list[str]) -> int:
    from mgpu_pipe.launch.composed import checked, composed

    def job(composition: Composition) -> int:
        config = checked(composition)
        from mgpu_pipe.report.overview import overview

        _print_rows(overview(config))
        return EXIT_OK

    return composed("check", DESCRIPTION, words, job)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    """Two columns, the second wrapped to the terminal's width."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, concealed(text))
    Console(highlight=False, markup=False, emoji=False).print(table)


VERB = Verb("say what would run, or what is wrong with it; start nothing", check, composes=True)
