"""How long a pipeline's schedule takes, by the dependencies of its streams alone. No torch.

Every action starts as soon as its rank is free and what it needs is there; messages take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_pipe.parallel.pipeline_streams import Action, StagesPerRank, Stream, stages_by_rank, streams

EQUAL = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""The papers' unit: a forward pass and each half of a backward pass take one."""


@dataclass(frozen=True)
class Timed:
    """An action, when it starts and when it ends."""

    action: Action
    start: float
    end: float


def timeline(by_rank: Sequence[Stream], durations: Mapping[str, float] = EQUAL) -> list[list[Timed]]:
    """Every rank's actions with their times.

    Args:
        durations: of one stage's ``F``, ``I``, ``W`` and ``B``, in any unit.

    Raises:
        ValueError: streams that wait for one another for ever.
    """
    ends: dict[Action, float] = {}
    last = max(action.stage for stream in by_rank for action in stream)
    rows: list[list[Timed]] = [[] for _ in by_rank]
    left = sum(map(len, by_rank))
    while left:
        before = left
        for stream, timed in zip(by_rank, rows, strict=True):
            while len(timed) < len(stream):
                action = stream[len(timed)]
                needed = [_end_of(need, ends) for need in needs(action, last)]
                if None in needed:
                    break
                free = timed[-1].end if timed else 0.0
                start = max([free, *(end for end in needed if end is not None)])
                ends[action] = start + durations[action.kind]
                timed.append(Timed(action, start, ends[action]))
                left -= 1
        if left == before:
            stuck = [
                str(stream[len(timed)]) for stream, timed in zip(by_rank, rows, strict=True) if len(timed) < len(stream)
            ]
            raise ValueError(f"the streams wait for one another: {', '.join(stuck)}")
    return rows


def needs(action: Action, last_stage: int) -> list[tuple[Action, ...]]:
    """What must have ended before ``action`` starts: one of each tuple (a backward pass may be whole or split)."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [(Action("F", stage - 1, micro_batch),)] if stage else []
    if kind == "W":
        return [(Action("I", stage, micro_batch),)]
    own = (Action("F", stage, micro_batch),)
    if stage == last_stage:
        return [own]
    return [own, (Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))]


def _end_of(any_of: tuple[Action, ...], ends: Mapping[Action, float]) -> float | None:
    return next((ends[action] for action in any_of if action in ends), None)


def bubble_of(timed: Sequence[Sequence[Timed]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they do nothing."""
    everything = [entry for row in timed for entry in row]
    span = max(entry.end for entry in everything) - min(entry.start for entry in everything)
    return 1.0 - sum(entry.end - entry.start for entry in everything) / (span * len(timed))


def theoretical_bubble(
    schedule: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: StagesPerRank = "auto",
    durations: Mapping[str, float] = EQUAL,
) -> float:
    """The bubble of a schedule whose stages all take the same time.

    It is ``(p-1) / (m+p-1)`` for GPipe and 1F1B and ``(p-1) / (v*m+p-1)`` for interleaved 1F1B, where ``m`` is a
    multiple of ``p`` (arXiv:2104.04473); the others have no closed form for every size, and are simulated.
    """
    return bubble_of(timeline(streams(schedule, ranks, micro_batches, stages_per_rank), durations))


def most_in_flight(stream: Stream) -> int:
    """The most forward passes, over all stages of a rank, whose backward pass has not begun."""
    most = now = 0
    for action in stream:
        now += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        most = max(most, now)
    return most


def forward_slots(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: StagesPerRank = "auto"
) -> list[Stream]:
    """The forward passes of each time slot, without backward passes: at most one a rank, stages ascending.

    Every rank takes of what is ready the latest stage, so that finished micro-batches leave first.
    """
    stages_of_ranks = stages_by_rank(schedule, ranks, stages_per_rank)
    last = sum(map(len, stages_of_ranks)) - 1
    done = [0] * (last + 1)  # micro-batches that each stage has finished
    slots: list[Stream] = []
    while done[last] < micro_batches:
        ready = [done[stage] < (done[stage - 1] if stage else micro_batches) for stage in range(last + 1)]
        chosen = [max((stage for stage in stages if ready[stage]), default=None) for stages in stages_of_ranks]
        slot = [Action("F", stage, done[stage]) for stage in sorted(s for s in chosen if s is not None)]
        for action in slot:
            done[action.stage] += 1
        slots.append(slot)
    return slots
