"""``submit``, an array of a thousand points and ``jobs`` over them, on a SLURM cluster of this machine.

The jobs are held, so that no run competes with what is timed.
``python -m benchmarks.commands.slurm``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.commands.runs_listing import cpu_seconds
from benchmarks.commands.startup import seconds
from benchmarks.support import finish
from tests.support.slurm_cluster import TINY, end_cluster, start_cluster

ROUNDS = 5
LIMITS = {"submit": 1.0, "array of 1,000 points": 15.0, "jobs, 1,000 of them": 0.5}
WORDS = [*TINY, "trainer.devices=1", "trainer.max_steps=6", "launch.sbatch=['--hold']"]
RATES = ",".join(f"{1e-5 * number:g}" for number in range(10, 260))


def main() -> None:
    array = ["-m", *WORDS, "hydra/launcher=slurm", "strategy=ddp,zero1", "seed=1,2", f"optimizer.lr={RATES}"]
    commands = {
        "submit": (["submit", *WORDS], ROUNDS),
        "submit, composing and checking alone": (["submit", *WORDS, "--dry-run"], ROUNDS),
        "array of 1,000 points": (array, 1),
        "jobs, 1,000 of them": (["jobs"], ROUNDS),
        "version (the program alone)": (["version"], ROUNDS),
    }
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="slurm-figures-") as name:
        cwd = Path(name)
        cwd.chmod(0o755)  # munged wants folders that all may enter
        cluster = start_cluster(cwd / "cluster")
        os.environ.update(cluster.variables, MGPU_PIPE_CACHE=str(cwd / "cache"))
        try:
            for what, (words, rounds) in commands.items():
                for _ in range(rounds):
                    before = cpu_seconds()
                    wall = seconds(["-m", "mgpu_pipe", *words], cwd)
                    times.setdefault(what, []).append((wall, cpu_seconds() - before))
                if what == "submit":
                    cluster.ask("scancel", "--state=PENDING", "--user=root")
        finally:
            end_cluster(cwd / "cluster")
    rows = [
        [what, *map(statistics.median, zip(*both, strict=True)), min(both)[0], LIMITS.get(what, "")]
        for what, both in times.items()
    ]
    notes = (
        f"Medians of {ROUNDS} cold processes; the array once. To the job's number on standard output, by the wall "
        "clock; on a busy machine the processor's time says what the wall clock does not. Of the array every point is "
        "composed, checked and frozen into a folder of its own."
    )
    columns = ["command", "seconds", "CPU seconds", "least seconds", "wanted, at most"]
    finish("slurm", "Submitting to SLURM and listing its jobs", columns, rows, notes)


if __name__ == "__main__":
    main()
