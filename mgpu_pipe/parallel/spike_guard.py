"""Refuses the update of a step whose gradient norm stands out (``optimizer.spike_guard``).

A norm is a spike where it is more than ``factor`` times the median of the ``window`` steps before it. The median takes
spikes in too: a few do not move it, and where norms stay high it follows them. The global norm is equal on every rank,
and so is what is decided.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.config.optimizer import SpikeGuardConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spike:
    """A step (one-based) whose update was refused."""

    step: int
    norm: float
    median: float

    def __str__(self) -> str:
        times = f"{self.norm / self.median:.3g} times" if self.median else "above"
        return f"the gradient norm of step {self.step} is {self.norm:.4g}, {times} the median of the steps before it"


class SpikeGuard:
    """Watches the gradient norms of a run.

    Args:
        tells: whether this process warns of the steps that are skipped.
    """

    def __init__(self, keys: SpikeGuardConfig | None = None, tells: bool = False) -> None:
        self._keys, self._tells = keys or SpikeGuardConfig(), tells
        self._norms: deque[float] = deque(maxlen=self._keys.window)
        self.stopped_by: Spike | None = None
        """The spike that ends the run."""

    def refuses(self, step: int, norm: float) -> bool:
        """Whether the (zero-based) step is to leave the weights as they are; called once a step, on every rank."""
        if self._keys.factor is None:
            return False
        full = len(self._norms) == self._keys.window
        median = statistics.median(self._norms) if full else 0.0
        spike = Spike(step + 1, norm, median) if full and norm > self._keys.factor * median else None
        if spike is not None and self._keys.action == "stop":
            self.stopped_by = spike  # a resume takes this step again
            return True
        self._norms.append(norm)
        if spike is not None and self._tells:
            _log.warning("%s: its update is skipped (optimizer.spike_guard)", spike)
        return spike is not None

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps; equal on every rank."""
        return {"gradient_norms": list(self._norms)} if self._norms else {}

    def restore(self, norms: Sequence[float]) -> None:
        self._norms.extend(float(norm) for norm in norms)
