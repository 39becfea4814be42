"""Clocks of a run and of its steps: the end by ``trainer.max_time``, saves by the clock, throughput.

Ranks have their own clocks: what one finds due, all learn at the end of a step, and act alike.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import DataConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError, print_line

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.data.step_batch import StepBatch


def run_length(data: DataConfig, trainer: TrainerConfig, prepared: Prepared) -> int:
    """Last optimizer step, by ``trainer.max_steps`` or whole steps of ``max_epochs``; ConfigError without one."""
    if trainer.max_steps is not None:
        return trainer.max_steps
    if trainer.max_epochs is None:
        raise ConfigError("trainer.max_steps", None, "give trainer.max_steps or trainer.max_epochs")
    steps = trainer.max_epochs * prepared.train_samples // data.global_batch_size
    if not steps:
        raise ConfigError(
            "trainer.max_epochs",
            trainer.max_epochs,
            "lower data.global_batch_size or raise max_epochs",
            f"{prepared.train_samples} training samples an epoch are not one step of {data.global_batch_size}",
        )
    return steps


JOB_ENDS = "MGPU_PIPE_JOB_ENDS"
"""The environment variable with a job's time limit, in seconds since the epoch."""
LEAVING_S = 10.0
"""Seconds to reserve after the last save for the run's end and for the job's requeue."""


def too_late(save_s: float) -> bool:
    """Whether a save after one more step might miss the job's time limit.

    SLURM looks at limits every 30 s and sends its warning up to a minute before the time that ``launch.warning_s``
    names; a save may take longer than what is left then.

    Args:
        save_s: seconds that the longest save took; 0 where there was none. Two of them have to fit, for one may be
            under way, and then the run's end.
    """
    ends = _job_end()
    if not save_s or time.time() + 2 * save_s + LEAVING_S < ends:
        return False
    _announce_job_end(ends)
    return True


@functools.lru_cache(maxsize=1)
def _job_end() -> float:
    return float(os.environ.get(JOB_ENDS, math.inf))


@functools.lru_cache(maxsize=1)
def _announce_job_end(ends: float) -> None:
    left = max(0.0, ends - time.time())
    print_line(f"stopping after this step: the job ends in {left:.0f} s, and a save takes long", file=sys.stderr)


class RunClock:
    """Measures the time in which a run trains, evaluates and saves.

    Args:
        max_s: ``trainer.max_time``; None ends nothing.
        every_n_minutes: ``checkpoint.every_n_minutes``.
        before_s: seconds that earlier attempts trained, from their checkpoint.
        logs: whether this process logs that the time is used up.
    """

    def __init__(
        self,
        max_s: float | None = None,
        every_n_minutes: float | None = None,
        before_s: float = 0.0,
        logs: bool = False,
    ) -> None:
        self.max_s, self._every, self._before, self._logs = max_s, every_n_minutes, before_s, logs
        self._began = self._saved = time.monotonic()

    def start(self) -> None:
        """The first step begins."""
        self._began = self._saved = time.monotonic()

    def state(self) -> dict[str, float]:
        """The checkpoint's entry of seconds so far; empty without a limit."""
        return {} if self.max_s is None else {"trained_s": self._before + time.monotonic() - self._began}

    def is_over(self) -> bool:
        """Whether the run has used up its time."""
        if self.max_s is None or self.state()["trained_s"] < self.max_s:
            return False
        if self._logs:
            print_line("stopping after this step: trainer.max_time is used up", file=sys.stderr)
            self._logs = False
        return True

    def save_is_due(self) -> bool:
        return self._every is not None and time.monotonic() - self._saved >= 60 * self._every

    def note_save(self) -> None:
        self._saved = time.monotonic()


class StepClock:
    """Measures a rank's steps, and keeps the times of those that count.

    Attributes:
        waited: seconds that the latest step waited for its batch.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._mark = self._cpu_mark = 0.0
        self._seconds: list[float] = []
        self._data_seconds: list[float] = []
        self._cpu_seconds: list[float] = []
        self._work: list[tuple[int, int, int]] = []
        """Tokens, samples and padding of each step."""

    def start_step(self) -> None:
        """Begin the time of a step."""
        self._mark, self._cpu_mark = time.perf_counter(), time.process_time()

    def receive_batch(self) -> None:
        """End the wait for the step's batch."""
        self.waited = time.perf_counter() - self._mark

    def end_step(self) -> tuple[float, float]:
        """End the step and begin the next; returns its seconds on the wall clock and of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        seconds, self._mark, self._cpu_mark = (wall - self._mark, cpu - self._cpu_mark), wall, cpu
        return seconds

    def count(self, batch: StepBatch, seconds: float, cpu_seconds: float) -> None:
        """Count a step in :meth:`throughput` and :meth:`times`."""
        self._seconds.append(seconds)
        self._data_seconds.append(self.waited)
        self._cpu_seconds.append(cpu_seconds)
        self._work.append((batch.num_tokens, batch.num_samples, batch.padding))

    def throughput(self) -> dict[str, float]:
        """Medians over the run, warm-up steps left out; tokens are those that the model computes, padding included."""
        if not self._seconds:
            return {}
        tokens, samples, padding = zip(*self._work, strict=True)
        return {
            "throughput/tokens_per_s": _median_rate(tokens, self._seconds),
            "throughput/samples_per_s": _median_rate(samples, self._seconds),
            "throughput/padding": sum(padding) / max(sum(tokens), 1),
            "throughput/step_s": statistics.median(self._seconds),
        }

    def times(self) -> dict[str, float]:
        """Seconds of this rank's steps in this attempt, without warm-up steps; 0 before the first.

        Ranks wait for one another in every step, so their steps take equally long: a slow rank shows because it
        waits longest for its data, or computes longest while the others wait.
        """
        steps = max(len(self._seconds), 1)
        return {
            "step_s": statistics.median(self._seconds or [0.0]),
            "slowest_s": max(self._seconds, default=0.0),
            "data_s": sum(self._data_seconds) / steps,
            "cpu_s": sum(self._cpu_seconds) / steps,
        }


def _median_rate(amounts: Sequence[int], seconds: Sequence[float]) -> float:
    return statistics.median(amount / duration for amount, duration in zip(amounts, seconds, strict=True))
