"""What a sweep shows at its end: one table, its page, and the command that continues it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report.tables import make_console, print_whole, relative_to_cwd, runs_table


def show_sweep(runs: Sequence[RunPaths], write: Callable[[], Path], again: str = "") -> None:
    """Print the table of a sweep's runs and write its page.

    Args:
        write: writes the page, and returns its path.
        again: the command that goes on, where a signal ended the sweep.
    """
    runs_table(list(dict.fromkeys(runs)))
    try:
        print_whole(make_console(), f"report: {relative_to_cwd(write())}")
    except (RunFolderError, OSError) as error:
        print(f"error: the sweep's report could not be written: {error}", file=sys.stderr)
    if again:
        print_whole(make_console(), f"go on: {again}")
    sys.stdout.flush()
