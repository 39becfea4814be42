"""A sweep of tiny runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from mgpu_pipe.sweep.store import Store

TINY = (
    "model=llama_tiny",
    "model.config.num_hidden_layers=1",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch_size=4",
    "data.synthetic.num_documents=100",
    "data.validation_max_samples=8",
    "trainer.accelerator=cpu",
    "logger=none",
    "precision=fp32",
    "launch.threads_per_worker=1",
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


TIMED = ("throughput", "memory", "time")
"""Metrics that are not the same twice."""


def losses(store: Store) -> dict[int, dict[str, float]]:
    """The metrics of every point that depend on its mathematics alone."""
    return {
        point.number: {name: value for name, value in point.metrics.items() if not name.startswith(TIMED)}
        for point in store.points()
    }


def status_of(folder: str) -> str:
    return str(json.loads((Path(folder) / "summary.json").read_text())["status"])
