"""One optimizer step up to its update: forward, backward, reduce, check, clip. Every engine runs :func:`run_step`.

The update follows in the engine's ``optimizer_step``, after Lightning's hooks."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.optim.gradients import SpikeGuard
from mgpu_pipe.training.step_gradients import MicroBatchStop, StepVotes


class NonFiniteStep(Exception):
    """The loss or the gradient norm of a step is not finite; says which, and holds the step batch."""

    def __init__(self, what: str, step_batch: StepBatch) -> None:
        super().__init__(f"{what} at step {step_batch.step + 1}")
        self.what, self.step_batch = what, step_batch


class StepEngine(ABC):
    """The parts of a step that differ between engines. All ranks call every method alike.

    Attributes:
        micro_batch_stop: decides whether a stop leaves the step between two micro-batches.
        spike_guard: refuses updates whose gradient norm stands out.
        save_due: whether this rank finds a save due.
        step_counts: whether the step batch has a trained token; set by :func:`run_step`, read by ``optimizer_step``.
    """

    micro_batch_stop: MicroBatchStop
    spike_guard: SpikeGuard
    save_due: Callable[[], bool]
    step_counts: bool

    @property
    def evaluation_follows(self) -> bool:
        """Whether an evaluation follows the current step. A stop abandons such a step: its evaluation may outlast
        ``launch.stop_timeout``, and a resume would skip it, because it begins after the step.
        """
        return False

    @abstractmethod
    def begin_step(self, step_batch: StepBatch) -> Sequence[Any]:
        """Clear the gradients and seed dropout; returns this rank's parts of the micro-batches."""

    @abstractmethod
    def forward_backward(self, parts: Sequence[Any], step_batch: StepBatch) -> torch.Tensor | None:
        """Run forward and backward of all parts; returns this rank's sum of losses, float64, or None after a stop."""

    @abstractmethod
    def reduce_gradients(
        self, loss_sum: torch.Tensor, votes: StepVotes, step_batch: StepBatch
    ) -> tuple[float, float, StepVotes]:
        """Reduce the gradients; returns the global loss, the gradient norm and the votes of all ranks. Collective."""

    def unscale(self, gradient_norm: float, step_batch: StepBatch) -> tuple[float, bool]:
        """Divide the gradients by the loss scale; returns their norm, and whether an update may follow. Default: no
        scale."""
        return gradient_norm, True

    @abstractmethod
    def clip(self, gradient_norm: float) -> None:
        """Clip the gradients to ``trainer.gradient_clip_val``, if it is set."""

    def drop_gradients(self) -> None:
        """Make this step's update change neither weights nor optimizer state. Default: clear all gradients."""
        self.zero_gradients()

    @abstractmethod
    def zero_gradients(self) -> None:
        """Clear all gradients."""


def run_step(engine: StepEngine, step_batch: StepBatch) -> StepResult:
    """Run a step batch up to its update; NonFiniteStep on every rank alike."""
    stop = engine.micro_batch_stop
    parts = engine.begin_step(step_batch)
    stop.begin()
    loss_sum = engine.forward_backward(parts, step_batch)
    if loss_sum is None:
        return StepResult.abandoned_step()
    loss, norm, votes = engine.reduce_gradients(loss_sum, stop.vote(engine.save_due()), step_batch)
    stop_now = stop.count(votes)
    if stop_now and engine.evaluation_follows:
        return StepResult.abandoned_step()
    engine.step_counts = step_batch.loss_denominator > 0
    if not engine.step_counts:
        engine.drop_gradients()
        return StepResult.nothing_counts(stop_now, stop.save_wanted)
    check_finite(loss, 0.0, step_batch)
    norm, updates = engine.unscale(norm, step_batch)
    if updates:
        check_finite(loss, norm, step_batch)
        if engine.spike_guard.refuses(step_batch.step, norm):
            engine.drop_gradients()
            updates = False
            if engine.spike_guard.stopped_by is not None:
                return StepResult.abandoned_step()
    if updates:
        engine.clip(norm)
    return StepResult(loss, norm, stop_now, skipped=not updates, save=stop.save_wanted)


def check_finite(loss: float, gradient_norm: float, step_batch: StepBatch) -> None:
    """Raise :class:`NonFiniteStep` unless both numbers, which are the same on every rank, are finite."""
    for value, what in ((loss, "the loss"), (gradient_norm, "the gradient norm")):
        if value - value != 0.0:
            raise NonFiniteStep(what, step_batch)


class StepTimes:
    """Clock of a rank's steps, which keeps the times of steps that count.

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
