"""Times of a rank's steps: waiting for data, processor time, throughput."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from mgpu_pipe.data.step_batch import StepBatch


class StepTimes:
    """Clock of a rank's steps; it keeps the times of those that count.

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
        """Seconds of the step by the wall and of this process; the next step begins."""
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

        Ranks wait for one another in every step, so their steps take equally long: what tells a slow rank is that it
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
