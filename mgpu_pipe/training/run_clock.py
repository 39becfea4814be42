"""The time that a run has trained, its end by ``trainer.max_time``, and saves by the clock.

Ranks have their own clocks: what one finds due, all learn at the end of a step, and act alike.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import DataConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError, print_line

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


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

    SLURM's warning comes a fixed time before the limit; a save may take longer.

    Args:
        save_s: seconds that the longest save took; 0 where there was none. Two of them have to fit, for one may be
            under way, and then the run's end.
    """
    ends = _ends()
    if not save_s or time.time() + 2 * save_s + LEAVING_S < ends:
        return False
    _say(ends)
    return True


@functools.lru_cache(maxsize=1)
def _ends() -> float:
    return float(os.environ.get(JOB_ENDS, math.inf))


@functools.lru_cache(maxsize=1)
def _say(ends: float) -> None:
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
