"""Reads a torch profiler's trace of a GPU: when it computed, ran a collective alone, or was idle.

A collective that overlaps with compute costs nothing. An idle GPU waits for the host: for a batch, or for the next
kernel.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgpu_pipe.training.profiling.link_table import ALL_TO_ALL

COMPUTE, OPTIMIZER, DATA, HOST = "compute", "optimizer", "data", "host"
PHASES = (COMPUTE, OPTIMIZER, DATA, HOST)
"""Work of a rank alone: forward and backward passes, the update, waiting for its batch, and all else."""
Phase = tuple[float, float, str]
"""Beginning, end, and one of :data:`PHASES`."""
Arrivals = Mapping[str, Sequence[float]]
"""Times at which one rank reached the collectives of each group, in their order."""


@dataclass(frozen=True)
class Blocked:
    """A stretch of time in which a rank did nothing but a collective.

    Attributes:
        axis: under its name in the configuration.
        stream, number: the group of the collective, and its index among that group's.
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
    by_phase: dict[str, float]
    """Seconds by phase, without collectives."""
    waiting: dict[str, float] = field(default_factory=dict)
    transfer: dict[str, float] = field(default_factory=dict)
    """Seconds by axis."""
    waits_for: dict[int, float] = field(default_factory=dict)
    """Seconds by rank."""


def breakdown(phases: Sequence[Phase], blocked: Sequence[Blocked], arrivals: Sequence[Arrivals]) -> Breakdown:
    """Split a rank's time into its own work, waiting and transfer.

    Args:
        phases: without gaps, in order.
        arrivals: every rank's, by this rank's clock. A collective without known arrivals is all waiting.
    """
    by_phase = dict.fromkeys(PHASES, 0.0)
    for begin, end, kind in phases:
        by_phase[kind] += end - begin
    result = Breakdown(phases[-1][1] - phases[0][0], by_phase)
    waiting: dict[str, float] = defaultdict(float)
    transfer: dict[str, float] = defaultdict(float)
    waits_for: dict[int, float] = defaultdict(float)
    begins = [phase[0] for phase in phases]
    for stretch in blocked:
        _subtract(stretch, phases, begins, by_phase)
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
    result.waiting, result.transfer, result.waits_for = dict(waiting), dict(transfer), dict(waits_for)
    return result


def _subtract(stretch: Blocked, phases: Sequence[Phase], begins: Sequence[float], by_phase: dict[str, float]) -> None:
    index = max(bisect_right(begins, stretch.begin) - 1, 0)
    while index < len(phases) and phases[index][0] < stretch.end:
        begin, end, kind = phases[index]
        by_phase[kind] -= max(0.0, min(end, stretch.end) - max(begin, stretch.begin))
        index += 1


MICROSECOND = 1e-6
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NCCL = "nccl"
SEND_AND_RECEIVE = "SendRecv"
"""Marks kernels that send and receive messages; their wait for the other end is not known."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Marks:
    """Ties a trace to the host's clock.

    Attributes:
        name: the range that was open at ``moment``, by the host's clock.
        phases: the host's, without gaps, in order.
        optimizer: the name of the optimizer's ranges.
    """

    name: str
    moment: float
    phases: Sequence[Phase]
    optimizer: str


def device_timeline(
    trace: Path, marks: Marks, axis_of: Callable[[Sequence[int], str, str], str]
) -> tuple[list[Phase], list[Blocked], Arrivals]:
    """The device's phases by the host's clock, collectives without compute, and their starts; ``axis_of`` names an
    axis."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    marked = next(event for event in events if event["name"] == marks.name and event["cat"] == "user_annotation")
    ahead = marked["ts"] * MICROSECOND - marks.moment

    def times(event: dict[str, Any]) -> Interval:
        begin = event["ts"] * MICROSECOND - ahead
        return begin, begin + event["dur"] * MICROSECOND

    device = sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    computing = _merge(times(event) for event in device if NCCL not in event["name"].lower())
    updates = _merge(
        times(event)
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == marks.optimizer
    )
    arrivals: dict[str, list[float]] = defaultdict(list)
    alone: list[Blocked] = []
    begin, end = marks.phases[0][0], marks.phases[-1][1]
    ends = [last for _, last in computing]
    until = begin  # an overlap with the collective before belongs to that one
    for event in device:
        if NCCL not in event["name"].lower():
            continue
        arguments, (began, ended) = event.get("args", {}), times(event)
        kind = ALL_TO_ALL if "all_to_all" in str(arguments.get("Collective name", "")) else ""
        message = SEND_AND_RECEIVE in event["name"] and not kind
        ranks = _ranks(arguments.get("Process Group Ranks"))
        stream = "" if message else f"{arguments.get('Process Group Name')} {ranks}"
        axis = axis_of(ranks, str(arguments.get("Process Group Description", "")), kind)
        number = len(arrivals.get(stream, ()))
        if not message:
            arrivals[stream].append(began)
        alone += [
            Blocked(first, last, axis, stream, number)
            for first, last in _without((max(began, until), min(ended, end)), computing, bisect_right(ends, began))
        ]
        until = max(until, ended)
    return list(_phases(marks.phases, computing, updates)), alone, arrivals


def _phases(host: Sequence[Phase], computing: Sequence[Interval], updates: Sequence[Interval]) -> Iterable[Phase]:
    """Cut the host's phases where the device starts and stops computing."""
    begin, end = host[0][0], host[-1][1]
    borders = {begin, end}
    for first, last in (*computing, *updates, *((first, last) for first, last, _ in host)):
        borders |= {min(max(first, begin), end), min(max(last, begin), end)}
    cuts = sorted(borders)
    places = {"host": 0, "computing": 0, "updates": 0}

    def inside(name: str, intervals: Sequence[tuple[Any, ...]], moment: float) -> bool:
        while places[name] < len(intervals) and intervals[places[name]][1] <= moment:
            places[name] += 1
        index = places[name]
        return index < len(intervals) and intervals[index][0] <= moment

    for first, last in pairwise(cuts):
        moment = (first + last) / 2
        updating, busy = inside("updates", updates, moment), inside("computing", computing, moment)
        waits = inside("host", host, moment) and host[places["host"]][2] == DATA
        yield first, last, (OPTIMIZER if updating else COMPUTE) if busy else DATA if waits else HOST


def _ranks(text_of_ranks: object) -> list[int]:
    """Parse a trace's list of ranks, such as ``[0, 1, 2]``; the trace truncates a long list."""
    text = str(text_of_ranks).strip("[]").replace("...", "")
    return [int(part) for part in text.split(",") if part.strip().isdecimal()]


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _without(interval: Interval, taken: Sequence[Interval], index: int) -> Iterable[Interval]:
    """Parts of ``interval`` outside the sorted ``taken``; those before ``index`` end before it."""
    begin, end = interval
    while begin < end:
        first, last = taken[index] if index < len(taken) else (end, end)
        if begin < min(first, end):
            yield begin, min(first, end)
        begin, index = max(begin, last), index + 1
