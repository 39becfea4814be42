"""From a torch profiler's trace of a GPU to what the GPU did when: compute, a collective alone, or nothing.

A collective beside which the GPU computes costs nothing. Where it does nothing at all, it waits for the host: for a
batch, or for the next kernel. No torch here.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgpu_pipe.profiling.axes import ALL_TO_ALL
from mgpu_pipe.profiling.breakdown import COMPUTE, DATA, HOST, OPTIMIZER, Arrivals, Blocked, Phase

MICROSECOND = 1e-6
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NCCL = "nccl"
SEND_AND_RECEIVE = "SendRecv"
"""Of a kernel that sends and receives messages: how long it waits for the other end cannot be told."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Marks:
    """Ties a trace to the host's clock.

    Attributes:
        name: of the range that was open at ``at``, by the host's clock.
        phases: the host's, without gaps, in order.
        optimizer: the name of the optimizer's ranges.
    """

    name: str
    at: float
    phases: Sequence[Phase]
    optimizer: str


def device_timeline(
    trace: Path, marks: Marks, axis_of: Callable[[Sequence[int], str, str], str]
) -> tuple[list[Phase], list[Blocked], Arrivals]:
    """The device's phases by the host's clock, the collectives that it did nothing beside, and when each began.

    Args:
        axis_of: the axis of a collective, from its group's ranks, torch's description of it, and its kind.
    """
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    marked = next(event for event in events if event["name"] == marks.name and event["cat"] == "user_annotation")
    ahead = marked["ts"] * MICROSECOND - marks.at

    def times(event: dict[str, Any]) -> Interval:
        begin = event["ts"] * MICROSECOND - ahead
        return begin, begin + event["dur"] * MICROSECOND

    device = sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    computing = _merged(times(event) for event in device if NCCL not in event["name"].lower())
    updates = _merged(
        times(event)
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == marks.optimizer
    )
    arrivals: dict[str, list[float]] = defaultdict(list)
    alone: list[Blocked] = []
    begin, end = marks.phases[0][0], marks.phases[-1][1]
    ends = [last for _, last in computing]
    until = begin  # what overlaps with a collective before it is that one's
    for event in device:
        if NCCL not in event["name"].lower():
            continue
        told, (began, ended) = event.get("args", {}), times(event)
        kind = ALL_TO_ALL if "all_to_all" in str(told.get("Collective name", "")) else ""
        message = SEND_AND_RECEIVE in event["name"] and not kind
        ranks = _ranks(told.get("Process Group Ranks"))
        stream = "" if message else f"{told.get('Process Group Name')} {ranks}"
        axis = axis_of(ranks, str(told.get("Process Group Description", "")), kind)
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
    """Cut the host's phases where the device begins and ends to compute."""
    begin, end = host[0][0], host[-1][1]
    borders = {begin, end}
    for first, last in (*computing, *updates, *((first, last) for first, last, _ in host)):
        borders |= {min(max(first, begin), end), min(max(last, begin), end)}
    cuts = sorted(borders)
    places = {"host": 0, "computing": 0, "updates": 0}

    def inside(name: str, intervals: Sequence[tuple[Any, ...]], moment: float) -> bool:
        while places[name] < len(intervals) and intervals[places[name]][1] <= moment:
            places[name] += 1
        at = places[name]
        return at < len(intervals) and intervals[at][0] <= moment

    for first, last in pairwise(cuts):
        moment = (first + last) / 2
        updating, busy = inside("updates", updates, moment), inside("computing", computing, moment)
        waits = inside("host", host, moment) and host[places["host"]][2] == DATA
        yield first, last, (OPTIMIZER if updating else COMPUTE) if busy else DATA if waits else HOST


def _ranks(told: object) -> list[int]:
    """Of ``[0, 1, 2]``, as the trace writes them; a long list is cut short there."""
    text = str(told).strip("[]").replace("...", "")
    return [int(part) for part in text.split(",") if part.strip().isdecimal()]


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _without(interval: Interval, taken: Sequence[Interval], at: int) -> Iterable[Interval]:
    """What of ``interval`` none of ``taken`` covers, which are in order; those before ``at`` end before it."""
    begin, end = interval
    while begin < end:
        first, last = taken[at] if at < len(taken) else (end, end)
        if begin < min(first, end):
            yield begin, min(first, end)
        begin, at = max(begin, last), at + 1
