"""The times of a rank's steps. Oracle: a clock that the test turns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.runs.metrics_file import rank_writer, read_ranks
from mgpu_pipe.training import recorder, run_clock
from mgpu_pipe.training.recorder import WARM_UP_STEPS, StepRecorder


class Clock:
    """Seconds by the wall and of this process."""

    wall = cpu = 100.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu


def test_a_ranks_step_its_wait_for_data_and_its_own_work_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    monkeypatch.setattr(run_clock, "time", clock)
    monkeypatch.setattr(recorder, "evaluate_after_this_step", lambda *_: None)
    checkpointer: Any = SimpleNamespace(
        step_was_finite=lambda step: None, due=lambda step: False, reserve=lambda *_: None
    )
    config = TrainerConfig(max_steps=9, log_every_n_steps=2)
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    steps = StepRecorder(
        config,
        max_steps=9,
        start_step=0,
        checkpointer=checkpointer,
        save_last=False,
        writer=None,
        progress=None,
        own_writer=rank_writer(paths, 1, 2, 0),
    )
    strategy = SimpleNamespace(step_metrics=dict, root_device=SimpleNamespace(type="cpu"))
    trainer: Any = SimpleNamespace(loggers=[], strategy=strategy)
    assert steps.times() == {"step_s": 0, "slowest_s": 0, "data_s": 0, "cpu_s": 0}
    steps.on_train_start(trainer, trainer)
    for step, (waited, worked, idle) in enumerate([(9, 9, 9)] * WARM_UP_STEPS + [(1, 2, 3), (0, 4, 2), (2, 3, 5)]):
        batch: Any = SimpleNamespace(step=step, num_tokens=1, num_samples=1, padding=0, loss_denominator=1)
        clock.wall += waited
        steps.on_train_batch_start(trainer, trainer, batch, step)
        clock.wall, clock.cpu = clock.wall + worked + idle, clock.cpu + worked
        result = StepResult(loss=1.0, gradient_norm=1.0, stop=False)
        steps.on_train_batch_end(trainer, trainer, {"result": result, "lr": 1e-3}, batch, step)
    assert steps.times() == {"step_s": 6, "slowest_s": 10, "data_s": 1, "cpu_s": 3}
    own = read_ranks(paths, 8)[1]
    assert (own["step"], own["data_s"], own["cpu_s"]) == ([2, 4], [9, 0], [9, 4]) and all(own["peak_gib"])


def test_rows_of_a_ranks_file_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    for rank in range(3):
        writer = rank_writer(paths, rank, 3, 0)
        assert writer is not None
        for step in (1, 2, 3):
            writer.append({"step": step, "data_s": rank, "cpu_s": 1.0, "peak_gib": 1.0})
        writer.close()
    for rank in range(2):  # goes on from step 2 with two processes
        writer = rank_writer(paths, rank, 2, 2)
        assert writer is not None
        writer.append({"step": 3, "data_s": 7.0, "cpu_s": 1.0, "peak_gib": 1.0})
        writer.close()
    tables = read_ranks(paths, 8)
    assert {rank: table["step"] for rank, table in tables.items()} == {0: [1, 2, 3], 1: [1, 2, 3], 2: [1, 2]}
    assert tables[1]["data_s"] == [1, 1, 7]
    assert rank_writer(paths, 0, 1, 1) is None and read_ranks(paths, 8)[2]["step"] == [1]
