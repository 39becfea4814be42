"""Runs launcher processes with stand-in workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = Path(__file__).with_name("launcher.py")


def start_launcher(folder: Path, behaviour: str, world_size: int, **options: object) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(LAUNCHER), str(folder), behaviour, str(world_size), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run_launcher(folder: Path, behaviour: str, world_size: int, **options: object) -> tuple[int, str, list[object]]:
    """Exit code, everything but the last line printed, and the outcome [status, attempt, message]."""
    process = start_launcher(folder, behaviour, world_size, **options)
    out, err = process.communicate(timeout=60)
    assert out, err
    lines = out.rstrip().splitlines()
    return process.returncode, "\n".join([err, *lines[:-1]]), json.loads(lines[-1])


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for ``condition``; an ample limit, so that nothing is asserted about speed."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
