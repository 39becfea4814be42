"""From what a rank did when, and when the others came to each collective, to seconds of a step by what they went to.

A rank's time is cut into phases, one after the other. What of it was spent in a collective, with nothing else to do,
is taken out of its phase and belongs to the collective's axis: until the last rank came to it, it is waiting for that
rank, and from then on transfer. No torch here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE, OPTIMIZER, DATA, HOST = "compute", "optimizer", "data", "host"
PHASES = (COMPUTE, OPTIMIZER, DATA, HOST)
"""What a rank does by itself: forward and backward passes, the update, waiting for its batch, and all else."""
Phase = tuple[float, float, str]
"""Beginning, end, and one of :data:`PHASES`."""
Arrivals = Mapping[str, Sequence[float]]
"""Of one rank: when it came to the collectives of each group, in their order."""


@dataclass(frozen=True)
class Blocked:
    """A stretch of time in which a rank did nothing but a collective.

    Attributes:
        axis: under its name in the configuration.
        stream, number: which collective it was: its group's, and the how manieth of it.
    """

    begin: float
    end: float
    axis: str
    stream: str
    number: int


@dataclass
class Breakdown:
    """Seconds of a rank's measured steps."""

    total: float
    own: dict[str, float]
    """By phase, collectives taken out."""
    waiting: dict[str, float] = field(default_factory=dict)
    transfer: dict[str, float] = field(default_factory=dict)
    """By axis."""
    waits_for: dict[int, float] = field(default_factory=dict)
    """By rank."""


def breakdown(phases: Sequence[Phase], blocked: Sequence[Blocked], arrivals: Sequence[Arrivals]) -> Breakdown:
    """What a rank's time went to.

    Args:
        phases: without gaps, in order.
        arrivals: every rank's, by this rank's clock. A collective of which nobody's is known is all waiting.
    """
    own = dict.fromkeys(PHASES, 0.0)
    for begin, end, kind in phases:
        own[kind] += end - begin
    found = Breakdown(phases[-1][1] - phases[0][0], own)
    waiting: dict[str, float] = defaultdict(float)
    transfer: dict[str, float] = defaultdict(float)
    waits_for: dict[int, float] = defaultdict(float)
    begins = [phase[0] for phase in phases]
    for stretch in blocked:
        _take_out(stretch, phases, begins, own)
        came = [
            (rank_arrivals[stretch.stream][stretch.number], rank)
            for rank, rank_arrivals in enumerate(arrivals)
            if stretch.number < len(rank_arrivals.get(stretch.stream, ()))
        ]
        last, rank = max(came, default=(stretch.end, None))
        waited = min(max(last - stretch.begin, 0.0), stretch.end - stretch.begin)
        waiting[stretch.axis] += waited
        transfer[stretch.axis] += stretch.end - stretch.begin - waited
        if waited and rank is not None:
            waits_for[rank] += waited
    found.waiting, found.transfer, found.waits_for = dict(waiting), dict(transfer), dict(waits_for)
    return found


def _take_out(stretch: Blocked, phases: Sequence[Phase], begins: Sequence[float], own: dict[str, float]) -> None:
    at = max(bisect_right(begins, stretch.begin) - 1, 0)
    while at < len(phases) and phases[at][0] < stretch.end:
        begin, end, kind = phases[at]
        own[kind] -= max(0.0, min(end, stretch.end) - max(begin, stretch.begin))
        at += 1
