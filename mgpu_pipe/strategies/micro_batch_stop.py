"""Leaving a step between two of its micro-batches: a long step must not delay a stop past ``launch.stop_timeout``.

A rank asked to stop must not leave alone: the next micro-batch's gathers would wait for it. So at some boundaries
between micro-batches all ranks vote, in a gloo group of their own (on the host: no device is waited for). Which
boundaries is decided from the last step's duration, which all ranks were told: one vote in about ``VOTE_EVERY_S``. A
step that is shorter has none, and its ranks agree at its end, in the reduction that is there anyway.

The abandoned step leaves no trace: nothing was updated, gradients are dropped, and a resume repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

VOTE_EVERY_S = 0.5


class MicroBatchStop:
    """Counts a step's micro-batches. Made, and every method called, by all ranks alike.

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
        """Of the last step, the same on all ranks; the first one's is not known."""

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def leaves(self, done: int, count: int) -> bool:
        """Whether to leave the step after ``done`` of its ``count`` micro-batches; equal on every rank. Collective."""
        if done in (0, count) or done % self._stride(count):
            return False
        if self._group is None:
            return self._requested()
        asked = torch.tensor([float(self._requested())])
        dist.all_reduce(asked, group=self._group)
        return bool(asked)

    def told(self, save: bool = False) -> list[float]:
        """What this rank contributes to the sum over all ranks at a step's end; see :meth:`heard`.

        Args:
            save: this rank finds that a save is due.
        """
        return [float(self._requested()), time.monotonic() - self._began, float(save)]

    def heard(self, asked: float, seconds: float, save: float) -> bool:
        """Take the sums of :meth:`told` over all ranks; whether any rank was asked to stop."""
        self._step_s = seconds / dist.get_world_size()
        self.save_wanted = save > 0
        return asked > 0

    def _stride(self, count: int) -> int:
        """Micro-batches between two votes."""
        return max(1, int(VOTE_EVERY_S * count / self._step_s)) if self._step_s > 0 else count
