"""The program as a user runs it: ``mgpu-pipe`` in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mgpu_pipe.launch.fork_server import NAME
from tests.support.program import ForkedProgram, run_program

REPOSITORY = Path(__file__).resolve().parents[2]


def environment(cache: Path) -> dict[str, str]:
    """This process's environment, without a distributed world, with the cache and the package of the tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), kept.get("PYTHONPATH"))))
    return {**kept, "MGPU_PIPE_CACHE": str(cache), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def launched(cache: Path, cwd: Path, *arguments: str) -> ForkedProgram:
    """Start it without waiting for imports."""
    return ForkedProgram(arguments, cwd, environment(cache))


def start(cache: Path, cwd: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start it in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mgpu_pipe", *arguments],
        cwd=cwd,
        env=environment(cache),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def mgpu(cache: Path, cwd: Path, *arguments: str, code: int = 0, timeout: float = 300) -> str:
    """Run to the end, expect ``code``, return stdout."""
    done = run_program(arguments, cwd, environment(cache), timeout)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def mgpu_anew(cache: Path, cwd: Path, *arguments: str, code: int = 0, timeout: float = 300) -> str:
    """The same in an interpreter of its own, as programs on GPUs need: CUDA does not survive a fork."""
    process = start(cache, cwd, *arguments)
    out, said = process.communicate(timeout=timeout)
    assert process.returncode == code, f"exit code {process.returncode}\n{out[-1500:]}\n{said[-1500:]}"
    return out if code == 0 else out + said


def run_folder(out: str) -> Path:
    """The folder that the last line of stdout names."""
    last = out.strip().splitlines()[-1]
    assert last.startswith("run: "), out
    return Path(last.removeprefix("run: "))


def four_steps(cache: Path, cwd: Path, experiment: str, *words: str) -> tuple[Path, dict[str, Any], str]:
    """Four steps of a shipped experiment on two processes, once finished: its folder, summary and report."""
    given = ("trainer.max_steps=4", "trainer.val_every_n_steps=4", "scheduler.warmup_steps=1", "logger=none")
    folder = run_folder(mgpu(cache, cwd, f"experiment={experiment}", "trainer.devices=2", *given, *words))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished"
    return folder, summary, (folder / "report.html").read_text(encoding="utf-8")


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> dict[int, float]:
    """A metric by step; fails on a double row."""
    rows = metrics(folder)
    found = {int(row["step"]): float(row[name]) for row in rows if row[name]}
    assert len({row["step"] for row in rows}) == len(rows), "a step has two rows"
    return found


def wait_for_step(
    folder: Path, step: int, process: ForkedProgram | subprocess.Popen[str], timeout: float = 240
) -> None:
    """Until ``metrics.csv`` has the row of ``step``."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (folder / "metrics.csv").exists() and any(int(r["step"]) >= step for r in metrics(folder) if r["step"]):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def workers_of(launcher: ForkedProgram) -> list[int]:
    """The launcher's workers, by rank; its orphan guard is a program of its own, a sweep's fork server has a name."""
    forked = Path(f"/proc/{launcher.pid}/cmdline").read_bytes()
    found = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    others = [pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() != NAME]
    return [int(pid) for pid in others if Path(f"/proc/{pid}/cmdline").read_bytes() == forked]
