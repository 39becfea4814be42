"""Page of a plan: its layouts by memory and speed, the winner's step as a timeline, memory by term, and more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe import __version__
from mgpu_pipe.checks.plan_layouts import PlannedRun
from mgpu_pipe.report.html import document
from mgpu_pipe.report.numbers import count, figure, gibibytes, seconds
from mgpu_pipe.system.local_files import replace_file

GIB = 1 << 30
RIVALS = 5
"""Layouts whose memory is shown by term."""
COMPUTE, OTHERS = "compute", "others"
EXPOSED = {
    "tensor_parallel": "tensor parallelism",
    "gathers": "gathers",
    "context_parallel": "context parallelism",
    "reduction": "reduction of gradients",
}
"""Names of parts of a step that are communication in its open, where the name of the part is not it."""
LEAST_TERM = 0.01
"""Share of a layout's memory from which a term has its own bar."""


@dataclass(frozen=True)
class Scale:
    """A linear axis, with room next to its ends, as places from 0 to 1."""

    largest: float
    smallest: float = 0.0

    def place(self, value: float) -> float:
        span = (self.largest - self.smallest) or 1.0
        room = 0.1 if self.smallest else 0.0
        return (room + (value - self.smallest) / span) / (1.1 + room)

    def ticks(self, text: Callable[[float], str]) -> list[tuple[float, str]]:
        """Places and texts of four ticks, and of the smallest value where that is not 0."""
        values = [self.smallest + share * (self.largest - self.smallest) for share in (0, 0.25, 0.5, 0.75, 1)]
        return [(self.place(value), text(value)) for value in values if value]


def write_plan_page(
    plans: Sequence[PlannedRun], smaller: Sequence[PlannedRun], larger: Sequence[PlannedRun], command: str, out: Path
) -> None:
    """Write the page to ``out``.

    Args:
        plans: the layouts, the best first.
        smaller: further ones that need less memory.
        larger: the best layout of each number of GPUs, in ascending order.
        command: what was typed.

    Raises:
        OSError: the page cannot be written.
    """
    replace_file(out, plan_page(plans, smaller, larger, command))


def plan_page(
    plans: Sequence[PlannedRun], smaller: Sequence[PlannedRun], larger: Sequence[PlannedRun], command: str
) -> str:
    """HTML of the page; see :func:`write_plan_page`."""
    best = plans[0]
    return document(
        "plan.html",
        [],
        title=f"Plan on {best.gpus} GPUs",
        heading=f"Plan on {best.gpus:,} of {best.profile.name}",
        subtitle=[command, f"the best layout: {name_of(best)}, {seconds(best.seconds)} a step"],
        layouts=_layouts([*plans, *smaller]),
        pareto=_pareto([*plans, *smaller]),
        timeline=_timeline(best),
        memory=_memory(plans[:RIVALS]),
        scaling=_scaling(larger),
        data={},
        many=False,
        watched="",
        footer=f"Written by mgpu_pipe {__version__}; predicted, not measured",
    )


def name_of(plan: PlannedRun) -> str:
    """A layout in words, such as ``tp 8 x pp 4, 1 row``."""
    rows = plan.layout.micro_batch_size
    return f"{plan.layout.name}, {rows} row{'s' if rows > 1 else ''}, {plan.layout.checkpointing}"


def _layouts(plans: Sequence[PlannedRun]) -> list[dict[str, str]]:
    return [
        {
            "number": str(number),
            "name": name_of(plan),
            "hardware": f"{plan.gpus:,} of {plan.profile.name}",
            "step": seconds(plan.seconds),
            "tokens": figure(plan.tokens_per_second / plan.gpus, 3),
            "memory": gibibytes(plan.memory.likely / GIB) + (" (tight)" if plan.is_tight else ""),
            "overrides": " ".join(plan.overrides),
        }
        for number, plan in enumerate(plans, start=1)
    ]


def _pareto(plans: Sequence[PlannedRun]) -> dict[str, Any]:
    """Points of tokens a second and GPU over memory; on the front are those that no other beats in both."""
    speeds = [plan.tokens_per_second / plan.gpus for plan in plans]
    sizes = [plan.memory.likely / GIB for plan in plans]
    limits = [plan.profile.memory_bytes / GIB for plan in plans]
    x, y = Scale(max(*sizes, *limits), min(sizes)), Scale(max(speeds), min(speeds))
    pairs = list(zip(sizes, speeds, strict=True))
    points: list[dict[str, Any]] = [
        {
            "number": number,
            "x": x.place(size),
            "y": y.place(speed),
            "front": not any(a <= size and b >= speed and (a, b) != (size, speed) for a, b in pairs),
            "text": f"{number}: {name_of(plan)}: {figure(speed, 3)} tokens/s a GPU, {gibibytes(size)}",
        }
        for number, (plan, size, speed) in enumerate(zip(plans, sizes, speeds, strict=True), start=1)
    ]
    points.sort(key=lambda point: (point["front"], -int(point["number"])))  # later ones lie above
    lines = sorted({(x.place(limit), plan.profile.name) for plan, limit in zip(plans, limits, strict=True)})
    up = y.ticks(lambda value: figure(value, 3))
    return {"points": points, "limits": lines, "across": x.ticks(lambda value: f"{value:.0f}"), "up": up}


def _timeline(plan: PlannedRun) -> list[dict[str, Any]]:
    """Parts of a step, one after the other, each with its place and width as shares of it."""
    parts: list[dict[str, Any]] = []
    start = 0.0
    named = {name: size for name, size in plan.parts.items() if size > 0}
    for name, size in sorted(named.items(), key=lambda part: (part[0] != COMPUTE, -part[1])):
        share = size / sum(named.values())
        words = EXPOSED.get(name, name.replace("_", " "))
        parts.append({"name": words, "start": start, "share": share, "text": seconds(size), "kind": len(parts) % 8})
        start += share
    return parts


def _memory(plans: Sequence[PlannedRun]) -> dict[str, Any]:
    """Bars of memory by term, the largest terms first; small ones together."""
    totals: dict[str, float] = {}
    for plan in plans:
        for name, size in plan.memory.terms.items():
            totals[name] = totals.get(name, 0) + size
    largest = max(plan.memory.likely for plan in plans)
    ordered = sorted(totals, key=lambda name: -totals[name])
    names = [name for name in ordered if any(p.memory.terms.get(name, 0) > LEAST_TERM * largest for p in plans)]
    names = names[:7]
    scale = Scale(max(max(plan.memory.high, plan.profile.memory_bytes) for plan in plans))
    bars = [_bar(number, plan, names, scale) for number, plan in enumerate(plans, start=1)]
    return {"names": [*names, OTHERS], "bars": bars, "across": scale.ticks(lambda value: f"{value / GIB:.0f}")}


def _bar(number: int, plan: PlannedRun, names: Sequence[str], scale: Scale) -> dict[str, Any]:
    terms: Mapping[str, float] = plan.memory.terms
    sizes = {name: terms.get(name, 0) for name in names}
    sizes[OTHERS] = sum(terms.values()) - sum(sizes.values())
    pieces, start = [], 0.0
    for kind, (name, size) in enumerate(sizes.items()):
        width = scale.place(size)
        pieces.append({"start": start, "width": width, "kind": kind, "text": f"{name}: {gibibytes(size / GIB)}"})
        start += width
    return {
        "title": f"{number}: {name_of(plan)}",
        "pieces": pieces,
        "low": scale.place(plan.memory.low),
        "high": scale.place(plan.memory.high),
        "limit": scale.place(plan.profile.memory_bytes),
        "text": f"{gibibytes(plan.memory.low / GIB)} to {gibibytes(plan.memory.high / GIB)}",
    }


def _scaling(plans: Sequence[PlannedRun]) -> dict[str, Any] | None:
    """Tokens a second of each number of GPUs, next to as many times those of the fewest; None for one number."""
    if len(plans) < 2:
        return None
    first = plans[0]
    ideal = [first.tokens_per_second * plan.gpus / first.gpus for plan in plans]
    x, y = Scale(max(plan.gpus for plan in plans)), Scale(max(*ideal, *(plan.tokens_per_second for plan in plans)))
    points = [
        {
            "x": x.place(plan.gpus),
            "y": y.place(plan.tokens_per_second),
            "text": f"{plan.gpus:,} GPUs: {count(plan.tokens_per_second)} tokens/s, {name_of(plan)}",
            "gpus": f"{plan.gpus:,}",
            "tokens": count(plan.tokens_per_second),
            "each": f"{figure(100 * plan.tokens_per_second / best, 3)}%",
            "name": name_of(plan),
            "memory": gibibytes(plan.memory.likely / GIB),
        }
        for plan, best in zip(plans, ideal, strict=True)
    ]
    line = [(x.place(plan.gpus), y.place(best)) for plan, best in zip(plans, ideal, strict=True)]
    return {"points": points, "ideal": line, "across": x.ticks(lambda value: f"{value:,.0f}"), "up": y.ticks(count)}
