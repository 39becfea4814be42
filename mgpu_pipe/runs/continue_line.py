"""The command that continues a run, whole and quoted for Hydra and the shell, so that a user can copy it."""

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
"""What Hydra's grammar takes without quotes, whatever it is."""


@dataclass(frozen=True)
class Asked:
    """What the user typed for a run.

    Attributes:
        overrides: the run's own, for the record.
        command: the whole command line, for the record.
        alone: flags and overrides that start this very run, for a point of a sweep without the sweep.
        swept: the overrides by which a point of a sweep differs from the others; none where there is no sweep.
        own: the options that ``./conf`` of the working folder brought.
        again: the command that continues the run, where it is not that of :func:`line_for`.
        chosen: told the run's folder as soon as it is known, before the run is begun.
    """

    overrides: Sequence[str]
    command: Sequence[str]
    alone: Sequence[str] = ()
    swept: Sequence[str] = ()
    own: Sequence[str] = ()
    again: Sequence[str] = ()
    chosen: Callable[[Path], None] = lambda folder: None

    def line(self, folder: Path, start: Sequence[str] = ()) -> str:
        """The command that continues the run in ``folder``; ``start`` as of :func:`line_for`."""
        return shlex.join(self.again) if self.again else line_for(self.alone, folder, start)


def line_for(alone: Sequence[str], folder: Path, start: Sequence[str] = ()) -> str:
    """The command that continues the run in ``folder``.

    Args:
        alone: flags and overrides that start this very run, for a point of a sweep without the sweep.
        start: the program that takes the words; by default this one.
    """
    words = [*without(alone, "run.dir", "checkpoint.resume"), f"run.dir={hydra_quoted(str(folder))}"]
    return shlex.join([*(start or this_program()), *words, "checkpoint.resume=auto"])


def without(words: Sequence[str], *keys: str) -> list[str]:
    """``words`` less the overrides of these keys."""
    return [word for word in words if word.partition("=")[0].lstrip("+~") not in keys]


def hydra_quoted(value: str) -> str:
    """``value``, quoted so that Hydra reads exactly this text."""
    if PLAIN.fullmatch(value):
        return value
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'").replace("${", r"\${")
    return f"'{escaped}'"


def this_program() -> list[str]:
    """How this program was called, so that a shell finds it again."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        return [python, "-m", "mgpu_pipe"]
    installed = shutil.which(PROGRAM)
    if script.name != PROGRAM or not script.exists() or (installed is not None and os.path.samefile(installed, script)):
        return [PROGRAM]
    return [str(script.absolute())]


def joined_start() -> list[str]:
    """What started this process as a rank: the command of its torchrun, or srun with as many tasks and nodes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        ours = [at for at, word in enumerate(command) if Path(word).name in ("mgpu_pipe", PROGRAM)]
        return command[: ours[0] + 1] if ours else []
    if "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_PROCID" in os.environ:
        nodes, tasks = os.environ.get("SLURM_STEP_NUM_NODES", "1"), os.environ["SLURM_STEP_NUM_TASKS"]
        return ["srun", f"--nodes={nodes}", f"--ntasks={tasks}", *this_program()]
    return []
