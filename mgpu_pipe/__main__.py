"""The command ``mgpu-pipe``, and ``python -m mgpu_pipe``: takes the stop signals over, then imports the program."""

import sys
from typing import NoReturn

from mgpu_pipe.launch import stop


def program() -> NoReturn:
    """Run the command line."""
    if stop.asks_for_a_run(sys.argv[1:]):
        stop.leave_until_a_run_begins()
    from mgpu_pipe import cli

    cli.program()


if __name__ == "__main__":
    program()
