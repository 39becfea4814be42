"""When the job that a run is part of ends, and whether a save would still be done by then."""

from __future__ import annotations

import functools
import math
import os
import sys
import time

JOB_ENDS = "MGPU_PIPE_JOB_ENDS"
"""Set for the processes of a job: its time limit, in seconds since the epoch."""
LEAVING_S = 10.0
"""For a run's end and for the job to be queued again, once all is saved."""


def too_late(save_s: float) -> bool:
    """Whether a save that begins after another step may not be done before the job's time limit.

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
    print(f"stopping after this step: the job ends in {left:.0f} s, and a save takes long", file=sys.stderr)
