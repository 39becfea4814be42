"""How long a run has trained, and what is due by that: its end (``trainer.max_time``) and saves by the clock.

Ranks have clocks of their own: what one finds due, all are told at the end of a step, and do alike.
"""

from __future__ import annotations

import sys
import time


class RunClock:
    """Runs while the run trains, evaluates and saves.

    Args:
        max_s: ``trainer.max_time``; None ends nothing.
        every_n_minutes: ``checkpoint.every_n_minutes``.
        before_s: what earlier attempts have trained, as their checkpoint says.
        tells: whether this process says that the time is used up.
    """

    def __init__(
        self,
        max_s: float | None = None,
        every_n_minutes: float | None = None,
        before_s: float = 0.0,
        tells: bool = False,
    ) -> None:
        self.max_s, self._every, self._before, self._tells = max_s, every_n_minutes, before_s, tells
        self._began = self._saved = time.monotonic()

    def start(self) -> None:
        """The first step begins."""
        self._began = self._saved = time.monotonic()

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, where there is a limit: the seconds so far."""
        return {} if self.max_s is None else {"trained_s": self._before + time.monotonic() - self._began}

    def is_over(self) -> bool:
        """Whether the run has had its time."""
        if self.max_s is None or self.state()["trained_s"] < self.max_s:
            return False
        if self._tells:
            print("stopping after this step: trainer.max_time is used up", file=sys.stderr)
            self._tells = False
        return True

    def save_is_due(self) -> bool:
        return self._every is not None and time.monotonic() - self._saved >= 60 * self._every

    def saved(self) -> None:
        self._saved = time.monotonic()
