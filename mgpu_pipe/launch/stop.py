"""The worker's stop flag: set by signals, asked for by training at each step boundary.

Nothing is saved inside a handler: that would stall collectives. The handler sets a flag; the ranks agree on it.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what SLURM jobs commonly ask for as their warning (``--signal=USR1@120``)."""
SAME_SIGNAL_S = 0.3
"""timeout(1) and torchrun deliver one request twice, to the process and to its group, within this time."""

_requested = False
_second_leaves = False


def install(*, second_leaves: bool) -> None:
    """Take over the stop signals of this process.

    Args:
        second_leaves: whether a second SIGINT or SIGTERM ends the process at once; under a launcher that watches,
            the launcher decides that.
    """
    global _second_leaves
    _second_leaves = second_leaves
    for number in STOP_SIGNALS:
        signal.signal(number, _on_signal)


def stop_requested() -> bool:
    """Whether this process was asked to stop. Ranks may differ: they have to agree before they act on it."""
    return _requested


class Insistence:
    """Tells a second SIGINT or SIGTERM, which leaves at once, from one request that was delivered twice."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_second(self, number: int) -> bool:
        if number == signal.SIGUSR1:  # a warning: the SIGTERM that follows it is the first request
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at > SAME_SIGNAL_S


_insistence = Insistence()


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
    if _insistence.is_second(number) and _second_leaves:
        os._exit(1)
