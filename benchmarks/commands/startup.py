"""Start-up times: ``check``, and the first training step over importing the libraries by themselves.

Every figure is the median of several cold processes, peers and this program taking turns.
``python -m benchmarks.commands.startup``.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.support import finish

ROUNDS = 5
IMPORTS = "import torch, transformers, pytorch_lightning"
TRAIN = ["model=llama_tiny", "data=synthetic", "trainer.max_steps=3", "logger=none", "checkpoint=none"]
USER_KEYS = [
    "experiment=quickstart",
    "optimizer=adamw",
    "model.config.num_hidden_layers=2",
    "~optimizer.options.betas",
    "optimizer._target_=torch.optim.RMSprop",
]
"""Overrides of a user's own: a field of the model's type, and the arguments of a class of torch."""
PACKAGE = str(Path(__file__).resolve().parents[2])


def seconds(arguments: list[str], cwd: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the libraries are compiled already, and so is an installed copy
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def to_first_step(cwd: Path, number: int) -> float:
    """From the command to the moment its first row of metrics is on disk."""
    folder = cwd / f"run-{number}"
    started = time.time()
    seconds(["-m", "mgpu_pipe", *TRAIN, f"run.dir={folder}"], cwd)
    return first_step(folder) - started


def first_step(folder: Path) -> float:
    """The moment when the first row of a run's metrics was on disk."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # The file's birth is its header; the last write is the last row's, so the first step ended no later than
    # the last write less the steps after it.
    later = sum(float(row["throughput/step_s"]) for row in rows[1:])
    return (folder / "metrics.csv").stat().st_mtime - later


def main() -> None:
    times: dict[str, list[float]] = {"imports": [], "first step": [], "check": [], "check, user's keys": []}
    with tempfile.TemporaryDirectory() as name:
        cwd = Path(name)
        os.environ["MGPU_PIPE_CACHE"] = str(cwd / "cache")
        to_first_step(cwd, -1)  # tokenises once
        for number in range(ROUNDS):
            times["imports"].append(seconds(["-c", IMPORTS], cwd))
            times["first step"].append(to_first_step(cwd, number))
            times["check"].append(seconds(["-m", "mgpu_pipe", "check", "experiment=quickstart"], cwd))
            times["check, user's keys"].append(seconds(["-m", "mgpu_pipe", "check", *USER_KEYS], cwd))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [[name, value, value / medians["imports"]] for name, value in medians.items()]
    finish(
        "startup",
        "Start-up, one process",
        ["what", "seconds", "over the imports"],
        rows,
        f"Medians of {ROUNDS} cold processes. imports: {IMPORTS.removeprefix('import ')}. first step: from the "
        "command to the end of the first optimizer step, data cached; the launcher's composing overlaps with the "
        "worker's imports.",
    )


if __name__ == "__main__":
    main()
