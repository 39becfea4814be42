"""What a sweep shows at its end: one table, a comparison report, and the command that continues it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.paths import COMPARISON, RunPaths
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.report.html import write_report
from mgpu_pipe.report.tables import make_console, print_whole, relative_to_cwd, runs_table


def show_sweep(runs: Sequence[RunPaths], folder: Path, again: str = "") -> None:
    """Print the table of a sweep's runs and write their comparison into ``folder``.

    Args:
        again: the command that goes on, where a signal ended the sweep.
    """
    folders = list(dict.fromkeys(runs))
    runs_table(folders)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print_whole(make_console(), f"report: {relative_to_cwd(write_report(folders, folder.absolute() / COMPARISON))}")
    except (RunFolderError, OSError) as error:
        print(f"error: the sweep's report could not be written: {error}", file=sys.stderr)
    if again:
        print_whole(make_console(), f"go on: {again}")
    sys.stdout.flush()
