"""What was submitted to SLURM: the job of a run or a sweep, kept in its folder, and SLURM's commands. No torch."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import BadInputError

JOB = "slurm.json"
"""In the folder of a run or a sweep: the job that it was submitted as last."""
POINTS = "points.txt"
"""In a sweep's folder: the run folders of its array, a line each."""


def keep_job(folder: Path, job: str) -> None:
    """Write that ``folder`` was submitted as this job."""
    replace_file(folder / JOB, json.dumps({"job": job, "submitted": time.time()}) + "\n")


def job_of(folder: Path) -> str:
    """The number of the job that a run or a sweep was submitted as last; empty where it never was."""
    try:
        return str(json.loads((folder / JOB).read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def log_of(folder: Path, job: str) -> Path:
    """Where a run's job writes what its tasks print."""
    return RunPaths(folder).logs / f"slurm-{job}.log"


def ask(command: Sequence[str], timeout_s: float | None = None) -> str:
    """What one of SLURM's commands prints.

    Raises:
        BadInputError: SLURM is not installed here, or refuses, or does not answer in time.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BadInputError(f"{shlex.join(command)}: no answer within {timeout_s:g} s") from None
    except FileNotFoundError:
        raise BadInputError(f"{command[0]}: is not on this machine; use a login node of the cluster") from None
    if done.returncode:
        raise BadInputError(f"{shlex.join(command)}: {said(done)}")
    return done.stdout


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Why one of SLURM's commands failed, in one line."""
    lines = [line.partition("error: ")[2] or line for line in done.stderr.strip().splitlines()]
    return " ".join(lines) or f"exit code {done.returncode}"


def seconds(text: str) -> float:
    """A time as SLURM writes it, ``[days-][[hours:]minutes:]seconds``; NaN for ``UNLIMITED`` and its like."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return math.nan
    return 86400.0 * int(days or 0) + sum(int(part) * 60**at for at, part in enumerate(reversed(parts)))
