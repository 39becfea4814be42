"""The sweep store's own time: of a run, and of reading a sweep of 1,000 runs.

``python -m benchmarks.sweep_store``. The peer of a run's records is ``replace_file``, which writes one small file as
every run does many times; that of the listing is the program's own start, ``mgpu-pipe version``.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.sweep.point import FINISHED, RUNNING, Point, me
from mgpu_pipe.sweep.store import Store, create

RUNS = 1000
RECORDED = 100
ASKED = {
    "words": ["-m"],
    "cwd": "/",
    "flags": [],
    "fixed": [],
    "seed": 1,
    "seeds": 1,
    "metrics": ["val/loss"],
    "minimize": [True],
    "search": "grid",
    "trials": 1,
    "space": [],
    "pruner": "none",
    "rungs": [],
    "parallel": 1,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        store = create(root, "thousand", ASKED)
        store.add([[[f"optimizer.lr={at / RUNS:g}", f"seed={at}"]] for at in range(RUNS)])
        record = statistics.median(
            _seconds(functools.partial(_record, store, point), 1) for point in store.points()[:RECORDED]
        )
        for point in store.points():
            store.change(point, status=FINISHED, metrics={"val/loss": 1.0 + point.number / RUNS})
        write = functools.partial(replace_file, root / "peer.json", "{}" * 200, flush=True)
        peer = statistics.median(_seconds(write, 1) for _ in range(RECORDED))
        rows = [
            ["record of a run", record],
            ["replace_file, flushed", peer],
            ["sweeps list", _program("sweeps", "list", f"run.root={root}")],
            ["sweeps show", _program("sweeps", "show", "thousand", f"run.root={root}")],
            ["version (the program alone)", _program("version")],
        ]
    notes = (
        f"A sweep of {RUNS} runs. A run's record is three changes: taken, its folder noted, its end; the median of "
        f"{RECORDED}. Commands: the fastest of five cold processes."
    )
    finish("sweep_store", "The sweep's store", ["what", "seconds"], rows, notes)


def _record(store: Store, point: Point) -> None:
    """What the store does for a run: it is taken, its folder noted, its end recorded."""
    taken = store.change(point, status=RUNNING, owner=me(), attempts=1)
    noted = taken and store.change(taken, folder="/outputs/run/2026-01-01_00-00-00-00000000")
    assert noted and store.change(noted, status=FINISHED, owner="", metrics={"val/loss": 2.0}, wall_s=3.0)


def _seconds(action: Callable[[], object], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - begun) / times


def _program(*words: str) -> float:
    """The fastest of five starts."""
    command = [sys.executable, "-m", "mgpu_pipe", *words]
    return min(_seconds(lambda: subprocess.run(command, check=True, capture_output=True), 1) for _ in range(5))


if __name__ == "__main__":
    main()
