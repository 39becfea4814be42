"""The command that resumes a run, complete and quoted for Hydra and the shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "mgpu-pipe"
PLAIN = re.compile(r"[\w./+~@-]+")
"""Texts that Hydra's grammar accepts without quotes."""


@dataclass(frozen=True)
class CommandLine:
    """The user's command line for a run.

    Attributes:
        overrides: the run's overrides, for the record.
        command: the whole command line, for the record.
        alone: flags and overrides that start this run, without the sweep of a point.
        swept: overrides that differ between the points of a sweep; empty without a sweep.
        local_options: options from ``./conf`` of the working directory.
        again: the command that resumes the run, if it differs from :func:`line_for`.
        chosen: called with the run's folder once it is known, before the run starts.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    alone: Sequence[str] = ()
    swept: Sequence[str] = ()
    local_options: Sequence[str] = ()
    again: Sequence[str] = ()
    chosen: Callable[[Path], None] = lambda folder: None

    def line(self, folder: Path, start: Sequence[str] = ()) -> str:
        """The command that resumes the run in ``folder``; ``start``: see :func:`line_for`."""
        return shlex.join(self.again) if self.again else line_for(self.alone, folder, start)


def line_for(alone: Sequence[str], folder: Path, start: Sequence[str] = ()) -> str:
    """The command that resumes the run in ``folder``, from ``start`` (this program) and the words of that run
    ``alone``."""
    words = [*without(alone, "run.dir", "checkpoint.resume"), f"run.dir={hydra_quoted(str(folder))}"]
    return shlex.join([*(start or this_program()), *words, "checkpoint.resume=auto"])


def without(words: Sequence[str], *keys: str) -> list[str]:
    """``words`` without the overrides of these keys."""
    return [word for word in words if word.partition("=")[0].lstrip("+~") not in keys]


def hydra_quoted(value: str) -> str:
    """``value``, quoted for Hydra where needed."""
    if PLAIN.fullmatch(value):
        return value
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'").replace("${", r"\${")
    return f"'{escaped}'"


def this_program() -> list[str]:
    """The command that calls this program from a shell."""
    script = Path(sys.argv[0])
    if script.parts[-2:] == ("mgpu_pipe", "__main__.py"):
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        return [python, "-m", "mgpu_pipe"]
    installed = shutil.which(PROGRAM)
    if script.name != PROGRAM or not script.exists() or (installed is not None and os.path.samefile(installed, script)):
        return [PROGRAM]
    return [str(script.absolute())]


def joined_start() -> list[str]:
    """Start of the command of this rank: its torchrun command, or srun with the same nodes and tasks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        ours = [index for index, word in enumerate(command) if Path(word).name in ("mgpu_pipe", PROGRAM)]
        return command[: ours[0] + 1] if ours else []
    if "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PROCID" in os.environ:
        nodes, tasks = os.environ.get("SLURM_STEP_NUM_NODES", "1"), os.environ["SLURM_STEP_NUM_TASKS"]
        return ["srun", f"--nodes={nodes}", f"--ntasks={tasks}", *this_program()]
    return []
