"""Share of a run's time that is useful, under failures, and the time between saves that makes it largest.

Failures come at random with a mean time M between them. A save stops training for C seconds; a failure costs the work
since the last save and R seconds until training resumes. To get ``t`` useful seconds between two saves takes
``M * exp(R / M) * (exp((t + C) / M) - 1)`` on average (Daly 2006, doi:10.1016/j.future.2004.11.016, equation 20).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALVINGS = 60
LONGEST = 300.0
"""Mean times between failures that no attempt outlives."""


@dataclass(frozen=True)
class Failures:
    """Failures of a run, in seconds.

    Attributes:
        between: mean time between failures of the whole run.
        stall: time that a save stops training for.
        restart: time from a failure until training resumes: detection, restart and load.
    """

    between: float
    stall: float
    restart: float

    @classmethod
    def from_gpus(cls, hours: float, gpus: int, stall: float, restart: float) -> Failures:
        """Failures of a run on ``gpus`` GPUs, each of which fails every ``hours`` hours."""
        return cls(3600.0 * hours / gpus, stall, restart)


def useful_share(interval: float, failures: Failures) -> float:
    """Expected share of useful time, with ``interval`` useful seconds between two saves."""
    mean = failures.between
    if max(failures.restart, interval + failures.stall) > LONGEST * mean:
        return 0.0
    needed = mean * math.exp(failures.restart / mean) * math.expm1((interval + failures.stall) / mean)
    return interval / needed


def best_interval(failures: Failures) -> float:
    """Useful seconds between two saves with the largest useful share.

    There the share's derivative is 0: ``t = M * (1 - exp(-(t + C) / M))``, which has one solution below M.
    """
    low, high = 0.0, failures.between
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle < failures.between * -math.expm1(-(middle + failures.stall) / failures.between):
            low = middle
        else:
            high = middle
    return high
