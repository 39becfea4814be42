"""A sweep of tiny runs."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

from mgpu_pipe.runs.metrics_file import METRIC_COLUMNS
from mgpu_pipe.sweep.point import FINISHED
from mgpu_pipe.sweep.store import Store, create

TINY = (
    *("model=llama_tiny", "model.config.num_hidden_layers=1", "data=synthetic", "data.seq_len=32"),
    *("data.global_batch_size=4", "data.synthetic.num_documents=100", "data.validation_max_samples=8"),
    *("trainer.accelerator=cpu", "logger=none", "precision=fp32", "launch.threads_per_worker=1"),
)


def asked(**more: object) -> dict[str, object]:
    """What ``sweep.json`` of a sweep without a command keeps."""
    return {
        "words": ["-m", "seed=1,2"],
        "cwd": "/",
        "flags": [],
        "fixed": [],
        "seed": 1,
        "seeds": 1,
        "metrics": ["val/loss"],
        "minimize": [True],
        "diverged_above": None,
        "search": "grid",
        "trials": 20,
        "space": [],
        "pruner": "none",
        "rungs": [],
        "parallel": 1,
        **more,
    }


def until(happened: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def recorded_sweep(root: Path, runs: int, rows: int, name: str = "mine", **more: object) -> Store:
    """A sweep of runs that were never trained: two parameters, a loss that follows from them, all columns of a run."""
    store = create(root, name, asked(**more))
    rates = [1e-4 * 10 ** (at % 10 / 4) for at in range(runs)]
    store.add(
        [
            [[f"optimizer.lr={rate:.3g}", f"scheduler={('cosine', 'wsd')[at // 10 % 2]}"]]
            for at, rate in enumerate(rates)
        ]
    )
    for at, (point, rate) in enumerate(zip(store.points(), rates, strict=True)):
        folder = root / "runs" / str(point.number)
        folder.mkdir(parents=True)
        apart, draw = abs(math.log10(rate) + 3), random.Random(at)
        lines = [",".join(METRIC_COLUMNS)]
        for step in range(1, rows + 1):
            loss = 3 + apart + 4 / step + draw.gauss(0, 0.05)
            held_out = f"{loss!r},{math.exp(loss)!r}" if step % max(1, rows // 5) == 0 else ","
            lines.append(
                f"{step},{loss!r},{1 + draw.random()!r},{rate!r},9000.5,70.25,0.125,0.0625,0.03125,,{held_out}"
            )
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        (folder / "config.yaml").touch()
        reached = {"val/loss": 3 + apart + 0.01 * (at // 10), "train/loss": 3 + apart}
        store.change(point, status=FINISHED, folder=str(folder), metrics=reached, step=rows, wall_s=60.0 + at)
    return store


TIMED = ("throughput", "memory", "time")
"""Metrics that are not the same twice."""


def losses(store: Store) -> dict[int, dict[str, float]]:
    """The metrics of every point that depend on its mathematics alone."""
    return {
        point.number: {name: value for name, value in point.metrics.items() if not name.startswith(TIMED)}
        for point in store.points()
    }


def status_of(folder: str) -> str:
    """As a run's summary and its report say it, which is the same."""
    status = str(json.loads((Path(folder) / "summary.json").read_text())["status"])
    assert f'<span class="pill {status}">{status}</span>' in (Path(folder) / "report.html").read_text()
    return status
