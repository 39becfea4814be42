"""The command ``mgpu-pipe``, and ``python -m mgpu_pipe``: takes the stop signals over, then imports the program."""

import gc
import sys

from mgpu_pipe.import_path import drop_first_folder

MADE_AND_KEPT = 200_000
"""Objects that ``check`` makes between two looks for garbage; at Python's own 700 they take a tenth of its time."""


def program() -> None:
    """Run the command line; does not return."""
    from mgpu_pipe.launch import signals as stop

    if stop.asks_for_a_run(sys.argv[1:]):
        stop.leave_until_a_run_begins()
    if sys.argv[1:2] == ["check"]:
        gc.set_threshold(MADE_AND_KEPT)
    from mgpu_pipe.cli import main as cli

    cli.program()


if __name__ == "__main__":
    drop_first_folder()
    program()
