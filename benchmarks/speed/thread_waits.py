"""What waiting threads cost: a step of ``llama_small`` by threads a rank, by how they wait, on free and on busy cores.

Whole runs of the program on one and two ranks, alternating. Beside the busy ones, as many processes as there are cores
compute without end. Each figure is the median step over that of one thread a rank under the same load. The library's
own waiting is what torch's OpenMP does unasked. ``python -m benchmarks.speed.thread_waits``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.system.hardware import SPIN_COUNT, SPIN_VARIABLE, WAITING_VARIABLES

ROUNDS, STEPS, WARM_UP = 2, 11, 3
OVERRIDES = (
    "model=llama_small",
    "data.seq_len=128",
    "data.global_batch_size=8",
    f"trainer.max_steps={STEPS}",
    "checkpoint=none",
    "data.validation_max_samples=8",
    "trainer.progress=off",
    "precision=fp32",
)
ONE = "one thread"
OWN = f"sleep after {SPIN_COUNT:,} turns (this project)"
WAITS = {
    ONE: {},
    "the library's own": {SPIN_VARIABLE: "300000"},
    OWN: {},
    "sleep at once": {"OMP_WAIT_POLICY": "passive"},
}


@contextmanager
def load(processes: int) -> Iterator[None]:
    """That many processes compute without end."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def step_seconds(ranks: int, threads: int, waits: dict[str, str]) -> list[float]:
    environment = {name: value for name, value in os.environ.items() if name not in WAITING_VARIABLES}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "mgpu_pipe",
                *OVERRIDES,
                f"strategy={'ddp' if ranks > 1 else 'single'}",
                f"trainer.devices={ranks}",
                f"launch.threads_per_worker={threads}",
                f"run.dir={run}",
            ],
            env={**environment, **waits},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return read_metrics(run / "metrics.csv")["throughput/step_s"][WARM_UP:]


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    seconds: dict[tuple[int, str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, busy in (("free", 0), ("busy", cores)):
            for ranks in (1, 2):
                for wait, waits in WAITS.items():
                    with load(busy):
                        found = step_seconds(ranks, 1 if wait == ONE else cores, waits)
                    seconds.setdefault((ranks, name, wait), []).extend(found)
                    print(f"{name}, {ranks} ranks, {wait}: {statistics.median(found):.3f} s", flush=True)
    rows = []
    for (ranks, name, wait), found in seconds.items():
        one = statistics.median(seconds[ranks, name, ONE])
        threads = 1 if wait == ONE else cores
        median = statistics.median(found)
        rows.append((name, ranks, threads, "-" if wait == ONE else wait, median * 1e3, median / one))
    finish(
        "thread_waits",
        "a step by threads and how they wait",
        ("cores", "ranks", "threads a rank", "waits", "step ms", "over one thread"),
        rows,
        f"busy: {cores} other processes compute without end. {ROUNDS} rounds, medians of {STEPS - WARM_UP} steps each.",
    )


if __name__ == "__main__":
    main()
