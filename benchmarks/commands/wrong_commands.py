"""How long a newcomer's wrong commands take to be refused, each in a cold process, and that each is one line.

The commands are those of ``tests/newcomer/commands.txt``. ``python -m benchmarks.commands.wrong_commands``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.support import finish
from tests.newcomer.folder import WrongCommand, make_folder, wrong_commands
from tests.support.command import REPOSITORY

SLOWEST = 12
WANTED_S = 2.0


@dataclass(frozen=True)
class Refusal:
    """What became of a command.

    Attributes:
        seconds: from its start to its end.
        processor_s: of it and its children; what it takes on an idle machine, whatever else runs on this one.
    """

    command: WrongCommand
    seconds: float
    processor_s: float
    one_line: bool


def refuse(command: WrongCommand, folder: Path) -> Refusal:
    """Run the command to its end in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"MGPU_PIPE_CACHE": str(folder.parent / "cache")}
    arguments = [sys.executable, "-m", "mgpu_pipe", *command.words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        began = time.perf_counter()
        process = subprocess.Popen(
            arguments, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=error
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        error.seek(0)
        lines = error.read().splitlines()
    one_line = process.returncode == 2 and len(lines) == 1 and lines[0].startswith(b"error: ")
    return Refusal(command, seconds, used.ru_utime + used.ru_stime, one_line)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "newcomer"
        make_folder(folder)
        wrong = wrong_commands()
        refuse(wrong[0], folder)  # compiles the modules
        found = sorted((refuse(command, folder) for command in wrong), key=lambda one: -one.seconds)
    seconds, processor = [one.seconds for one in found], [one.processor_s for one in found]
    late = sum(time > WANTED_S for time in seconds)
    rows: list[list[object]] = [
        ["all: median", median(seconds), median(processor), all(one.one_line for one in found)],
        ["all: slowest", max(seconds), max(processor), all(one.one_line for one in found)],
    ]
    rows += [[one.command.typed, one.seconds, one.processor_s, one.one_line] for one in found[:SLOWEST]]
    busy = os.getloadavg()[0]
    finish(
        "wrong_commands",
        f"A newcomer's {len(found)} wrong commands",
        ["command", "seconds", "processor seconds", "one line, exit code 2"],
        rows,
        f"{late} of {len(found)} take more than {WANTED_S:g} s; {sum(time > WANTED_S for time in processor)} take more "
        f"processor time than that; {sum(not one.one_line for one in found)} are not one line. "
        f"Load average at the end: {busy:.1f}; on a machine that others use, seconds are theirs too.",
    )


if __name__ == "__main__":
    main()
