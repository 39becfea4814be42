"""The times of a rank's steps. Oracle: a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.training import recorder
from mgpu_pipe.training.recorder import WARM_UP_STEPS, StepRecorder


class Clock:
    """Seconds by the wall and of this process."""

    wall = cpu = 100.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu


def test_a_ranks_step_its_wait_for_data_and_its_own_work_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(recorder, "evaluate_after_this_step", lambda *_: None)
    checkpointer: Any = SimpleNamespace(step_was_finite=lambda step: None, due=lambda step: False)
    config = TrainerConfig(max_steps=9, log_every_n_steps=100)
    steps = StepRecorder(
        config, max_steps=9, start_step=0, checkpointer=checkpointer, save_last=False, writer=None, progress=None
    )
    trainer: Any = SimpleNamespace(loggers=[])
    assert steps.times() == {"step_s": 0, "slowest_s": 0, "data_s": 0, "cpu_s": 0}
    steps.on_train_start(trainer, trainer)
    for step, (waited, worked, idle) in enumerate([(9, 9, 9)] * WARM_UP_STEPS + [(1, 2, 3), (0, 4, 2), (2, 3, 5)]):
        batch: Any = SimpleNamespace(step=step, num_tokens=1, num_samples=1, padding=0)
        clock.wall += waited
        steps.on_train_batch_start(trainer, trainer, batch, step)
        clock.wall, clock.cpu = clock.wall + worked + idle, clock.cpu + worked
        result = SimpleNamespace(stop=False, abandoned=False, loss=1.0, gradient_norm=1.0)
        steps.on_train_batch_end(trainer, trainer, {"result": result, "lr": 1e-3}, batch, step)
    assert steps.times() == {"step_s": 6, "slowest_s": 10, "data_s": 1, "cpu_s": 3}
