"""What a run's end means. Oracle: the words of a summary as the launcher writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.errors import EXIT_STOPPED
from mgpu_pipe.launch.micro_batch_tries import MicroBatchStoppedError
from mgpu_pipe.sweep.best import pareto
from mgpu_pipe.sweep.point import Point
from mgpu_pipe.sweep.store import create
from mgpu_pipe.sweep.sweep_outcome import outcome, refused
from tests.sweep.support import asked


@pytest.mark.parametrize(
    ("code", "kind", "message", "short", "status"),
    [
        (0, "", "", False, "finished"),
        (75, "", "", False, "stopped"),
        (1, "NonFiniteError", "the loss is not finite at step 3", False, "diverged"),
        (1, "OutOfMemoryError", "rank 0 ran out of memory", False, "out_of_memory"),
        (1, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried", False, "out_of_memory"),
        (1, "WorkerError", "killed by SIGKILL (the kernel does that when memory runs out)", True, "out_of_memory"),
        (1, "WorkerError", "killed by SIGKILL (the kernel does that when memory runs out)", False, "interrupted"),
        (1, "KeyError", "'x'", False, "failed"),
    ],
)
def test_an_end_has_a_name(code: int, kind: str, message: str, short: bool, status: str) -> None:
    summary = {"error": {"type": kind, "message": message}} if kind else {"metrics": {"train/loss": 9.0}}
    assert outcome(code, summary, short)[0] == status
    assert outcome(code, summary, short, bound=8.0)[0] == ("diverged" if status == "finished" else status)


def test_a_point_that_was_stopped_before_its_run_is_no_failure(tmp_path: Path) -> None:
    store = create(tmp_path, "s", asked(), [[["seed=1"]]])
    assert refused(store, store.points()[0], MicroBatchStoppedError("stopped")) == EXIT_STOPPED
    assert store.points()[0].status == "stopped"


def test_the_front_of_two_metrics() -> None:
    reached = {1: (10.0, 1.0), 2: (20.0, 2.0), 3: (15.0, 2.5), 4: (20.0, 2.0)}
    points = [
        Point(number, (), number, status="finished", metrics={"speed": speed, "memory": memory})
        for number, (speed, memory) in reached.items()
    ]
    points.append(Point(5, (), 5, status="out_of_memory", metrics={"speed": 99.0, "memory": 0.0}))
    points.append(Point(6, (), 6, status="finished", metrics={"speed": 99.0}))
    assert [point.number for point in pareto(points, ["speed", "memory"], [False, True])] == [2, 4, 1]
