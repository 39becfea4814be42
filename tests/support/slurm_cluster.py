"""A real SLURM cluster for tests: three nodes on this machine, started by scripts/local_slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command import REPOSITORY, environment, mgpu

SCRIPT = REPOSITORY / "scripts" / "local_slurm"
TINY = (
    *("launch=slurm", "model=llama_tiny", "data=synthetic", "data.synthetic.num_documents=200", "data.seq_len=32"),
    *("data.global_batch_size=8", "data.tokenize_workers=1", "trainer.accelerator=cpu"),
    *("launch.threads_per_worker=1", "logger=none"),
)


def need_slurm() -> None:
    """Skip where no cluster can be started."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            pytest.skip(f"there is no {program}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("a cluster of SLURM on this machine needs root")


@dataclass
class Cluster:
    """A cluster under way; ``conf`` is its slurm.conf."""

    conf: Path

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def ask(self, *command: str, code: int = 0) -> str:
        """What one of SLURM's commands prints."""
        done = subprocess.run(command, env={**os.environ, **self.variables}, capture_output=True, text=True)
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, cache: Path, cwd: Path, *words: str) -> tuple[str, Path]:
        """``mgpu-pipe submit``; the job's number and the run's folder, from its last two lines."""
        out = mgpu(cache, cwd, "submit", *words)
        found = re.search(r"^job: (\d+)\nrun: (.*)\n\Z", out, re.MULTILINE)
        assert found, out
        return found[1], Path(found[2])

    def state(self, job: str) -> str:
        return self.ask("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T").strip()

    def wait(self, job: str, *states: str, seconds: float = 240) -> str:
        """Wait until the job is in one of ``states``."""
        return self.until(lambda: self.state(job) in states and self.state(job), f"{job} in {states}", job, seconds)

    def ended(self, job: str, folder: Path, seconds: float = 240) -> str:
        """Wait for the job's end; its last state."""
        done = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        state = self.wait(job, *done, seconds=seconds)
        if state != "COMPLETED":
            print(self.log(folder))
        return state

    def log(self, folder: Path) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted((folder / "logs").glob("slurm-*.log")))

    def until(self, condition: Callable[[], object], what: str, job: str = "", seconds: float = 240) -> str:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                about = self.ask("scontrol", "show", "job", job) if job else self.ask("sinfo")
                raise AssertionError(f"never came: {what}\n{about}")
            time.sleep(0.1)
        return str(found)

    def nothing_left(self) -> bool:
        """Whether no process of a job is left."""
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if f"SLURM_CONF={self.conf}".encode() in variables and any(
                v.startswith(b"SLURM_JOB_ID=") for v in variables
            ):
                return False
        return True


def start_cluster(folder: Path) -> Cluster:
    """Start a cluster whose jobs have other numbers than those of pytest's other workers.

    The ranks' port follows from the job's number, and all clusters of the tests share this machine's ports.
    """
    need_slurm()
    first_job = 1 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    clean = {name: value for name, value in environment(folder).items() if not name.startswith("SLURM")}
    command = [str(SCRIPT), "up", str(folder), "--first-job", str(first_job)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("export SLURM_CONF="), last
    return Cluster(Path(last.removeprefix("export SLURM_CONF=")))


def end_cluster(folder: Path) -> None:
    subprocess.run([str(SCRIPT), "down", str(folder)], check=True)
    assert not folder.exists()
