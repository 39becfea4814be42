"""A sweep's own time: of a run's records, of reading and drawing 1,000 runs, of the way from one run to the next.

``python -m benchmarks.commands.sweep_store``. The peer of a run's records is ``replace_file``, which writes one small
file as every run does many times; that of the commands is the program's own start, ``mgpu-pipe version``; that of the
way from one run's end to the next one's first step is a fresh start's way to its first step.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.commands.runs_listing import cpu_seconds
from benchmarks.commands.startup import TRAIN, first_step, seconds, to_first_step
from benchmarks.support import finish
from mgpu_pipe.sweep.point import FINISHED, RUNNING, Point, worker_id
from mgpu_pipe.sweep.store import Store, create, find
from mgpu_pipe.system.local_files import replace_file
from tests.sweep.support import asked, recorded_sweep

RUNS = ROWS = 1000
RECORDED, ROUNDS = 100, 5


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        os.environ["MGPU_PIPE_CACHE"] = str(root / "cache")
        store = recorded_sweep(root, RUNS, ROWS, "thousand")
        small = create(root, "small", asked())
        small.add([[[f"seed={at}"]] for at in range(RECORDED)])
        record = statistics.median(_seconds(functools.partial(_record, small, point)) for point in small.points())
        write = functools.partial(replace_file, root / "peer.json", "{}" * 200, flush=True)
        peer = statistics.median(_seconds(write) for _ in range(RECORDED))
        rows: list[list[object]] = [["record of a run", record, ""], ["replace_file, flushed", peer, ""]]
        for words in (
            ["sweeps", "list"],
            ["sweeps", "show", "thousand"],
            ["sweeps", "report", "thousand"],
            ["version"],
        ):
            where = [f"run.root={root}"] if words[0] == "sweeps" else []
            rows.append([" ".join(words[:2]), *_program([*words, *where], root)])
        size = (store.folder / "report.html").stat().st_size / 1e6
        to_first_step(root, -1)
        fresh = statistics.median(to_first_step(root, number) for number in range(ROUNDS))
        rows += [
            ["fresh start to its first step", fresh, ""],
            ["run's end to the next one's first step", _gap(root), ""],
        ]
    notes = (
        f"A sweep of {RUNS} runs of {ROWS} rows each; its report has {size:.1f} MB. A run's record is three changes: "
        f"taken, its folder noted, its end; the median of {RECORDED}. Commands: the fastest of {ROUNDS} cold "
        "processes, and the least processor time. First steps: medians."
    )
    finish("sweep_store", "A sweep's own time", ["what", "seconds", "CPU seconds"], rows, notes)


def _record(store: Store, point: Point) -> None:
    """What the store does for a run: it is taken, its folder noted, its end recorded."""
    taken = store.change(point, status=RUNNING, owner=worker_id(), attempts=1)
    noted = taken and store.change(taken, folder="/outputs/run/2026-01-01_00-00-00-00000000")
    assert noted and store.change(noted, status=FINISHED, owner="", metrics={"val/loss": 2.0}, wall_s=3.0)


def _gap(root: Path) -> float:
    """The median over a sweep's runs, from the moment that a run's summary stood."""
    seeds = ",".join(map(str, range(ROUNDS + 1)))
    seconds(["-m", "mgpu_pipe", "-m", *TRAIN, f"seed={seeds}", "sweep.name=gap", f"run.root={root}"], root)
    folders = [Path(point.folder) for point in find(root, "gap").points()]
    ends = [(folder / "summary.json").stat().st_mtime for folder in folders]
    return statistics.median(first_step(later) - end for end, later in zip(ends, folders[1:], strict=False))


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _program(words: list[str], cwd: Path) -> tuple[float, float]:
    """Of some cold starts the fastest, and the least processor time."""
    times = []
    for _ in range(ROUNDS):
        before = cpu_seconds()
        times.append((seconds(["-m", "mgpu_pipe", *words], cwd), cpu_seconds() - before))
    walls, cpus = zip(*times, strict=True)
    return min(walls), min(cpus)


if __name__ == "__main__":
    main()
