"""Records the held-out loss of 300 short real runs over learning rate, decay and warm-up, on which searches are tried.

``python -m scripts.sweep_curves``: some minutes of two cores; begun again, it records what is missing. The runs are
ordinary ones, one after another in two processes, and ``results/sweep_curves.csv`` holds their curves.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support import RESULTS

TABLE = RESULTS / "sweep_curves.csv"
STEPS, EVERY = 27, 3
RATES = [3e-4 * 10 ** (at * 2.5 / 9) for at in range(10)]
DECAYS = [0.01, 0.1, 0.3, 1.0, 3.0]
WARM_UPS = [0, 1, 3, 6, 12, 24]
KEYS = ("optimizer.lr", "optimizer.weight_decay", "scheduler.warmup_steps")
BASE = [
    "model=llama_tiny",
    "model.config.num_hidden_layers=1",
    "data.seq_len=32",
    "data.global_batch_size=8",
    "data.validation_max_samples=16",
    f"trainer.max_steps={STEPS}",
    f"trainer.val_every_n_steps={EVERY}",
    "trainer.accelerator=cpu",
    "trainer.progress=off",
    "strategy=single",
    "precision=fp32",
    "checkpoint=none",
    "logger=none",
]
PROCESSES = 2


def main() -> None:
    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.data.prepare_data import prepare

    prepare(compose(BASE)[0])
    if not TABLE.exists():
        steps = [str(step) for step in range(EVERY, STEPS + 1, EVERY)]
        TABLE.write_text(",".join([*KEYS, *steps]) + "\n", encoding="utf-8")
    commands = [[sys.executable, "-m", "scripts.sweep_curves", str(share)] for share in range(PROCESSES)]
    for child in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]:
        if child.wait():
            raise SystemExit(child.returncode)
    header, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    places = {point: at for at, point in enumerate(grid())}
    lines.sort(key=lambda line: places[point_of(line)])  # type: ignore[index]
    TABLE.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    print(f"{len(lines)} runs: {TABLE}")


def point_of(line: str) -> tuple[float, ...]:
    return tuple(map(float, line.split(",")[: len(KEYS)]))


def grid() -> list[tuple[float, float, float]]:
    return list(itertools.product([float(f"{rate:.4g}") for rate in RATES], DECAYS, map(float, WARM_UPS)))


def record(share: int) -> None:
    """Train every ``PROCESSES``-th run that the table lacks, and append its values and held-out losses."""
    import torch

    from mgpu_pipe.config.hydra.compose import compose
    from mgpu_pipe.data.prepare_data import prepare
    from mgpu_pipe.launch.process_group import process_group
    from mgpu_pipe.launch.world import World, launcher_store

    torch.set_num_threads(1)
    config, _ = compose(BASE)
    prepared = prepare(config)
    world, timeout = World(0, 0, 1, 1, "127.0.0.1", 0), config.launch.collective_timeout
    there = {point_of(line) for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]}
    with (
        TABLE.open("a", encoding="utf-8") as file,
        process_group(world, launcher_store(world, timeout), "cpu", timeout),
    ):
        for point in grid()[share::PROCESSES]:
            if point in there:
                continue
            rate, decay, warm_up = point
            optimizer = replace(config.optimizer, lr=rate, weight_decay=decay)
            scheduler = replace(config.scheduler, warmup_steps=int(warm_up))
            losses = curve(replace(config, optimizer=optimizer, scheduler=scheduler), prepared)
            print(rate, decay, int(warm_up), *(f"{loss:.5f}" for loss in losses), sep=",", file=file, flush=True)


def curve(config: Any, prepared: Any) -> list[float]:
    """Held-out losses of a run; infinite after it diverged."""
    from mgpu_pipe.config.freeze import freeze
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.errors import NonFiniteError
    from mgpu_pipe.runs.metrics_file import read_metrics
    from mgpu_pipe.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        freeze(config, paths.config)
        with suppress(NonFiniteError):
            train(config, paths, prepared)
        found = read_metrics(paths.metrics)
    reached = {int(step): loss for step, loss in zip(found["step"], found["val/loss"], strict=True)}
    losses = [reached.get(step, math.nan) for step in range(EVERY, STEPS + 1, EVERY)]
    return [math.inf if math.isnan(loss) else loss for loss in losses]


if __name__ == "__main__":
    if sys.argv[1:]:
        record(int(sys.argv[1]))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
