"""One optimizer step up to its update: forward, backward, reduce, check, clip. Every engine runs :func:`run_step`.

The update follows in the engine's ``optimizer_step``, after Lightning's hooks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.optim.gradients import SpikeGuard


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


VOTE_EVERY_S = 0.5
"""Seconds between two votes on a stop inside a step."""


@dataclass(frozen=True)
class StepVotes:
    """Votes at a step's end: those of one rank, or their sums over all ranks.

    Attributes:
        stop: ranks that were asked to stop.
        seconds: time that the step took.
        save: ranks that find a save due.
    """

    stop: float
    seconds: float
    save: float

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> StepVotes:
        """The votes of all ranks from the all-reduced :meth:`as_list`."""
        return cls(*sums)

    def as_list(self) -> list[float]:
        """Numbers to all-reduce."""
        return [self.stop, self.seconds, self.save]


VOTES = len(fields(StepVotes))


class MicroBatchStop:
    """Decides whether a stop leaves a step between two micro-batches. All ranks call every method alike.

    Args:
        requested: whether this process was asked to stop.
    """

    def __init__(self, requested: Callable[[], bool]) -> None:
        self._requested = requested
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self.save_wanted = False
        """Some rank wanted a save, at the last step's end."""
        self._began = 0.0
        self._step_s = float("inf")
        """Seconds of the last step, equal on all ranks; infinite before the first step ends."""

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def should_leave(self, done: int, count: int) -> bool:
        """Whether to leave the step after ``done`` of its ``count`` micro-batches; equal on every rank. Collective."""
        if done in (0, count) or done % self._stride(count):
            return False
        if self._group is None:
            return self._requested()
        stop_requested = torch.tensor([float(self._requested())])
        dist.all_reduce(stop_requested, group=self._group)
        return bool(stop_requested)

    def vote(self, save: bool) -> StepVotes:
        """This rank's votes at a step's end; ``save``: it finds that a save is due."""
        return StepVotes(float(self._requested()), time.monotonic() - self._began, float(save))

    def count(self, votes: StepVotes) -> bool:
        """Take the votes of all ranks; whether any rank was asked to stop."""
        self._step_s = votes.seconds / dist.get_world_size()
        self.save_wanted = votes.save > 0
        return votes.stop > 0

    def _stride(self, count: int) -> int:
        """Micro-batches between two votes."""
        return max(1, int(VOTE_EVERY_S * count / self._step_s)) if self._step_s > 0 else count
