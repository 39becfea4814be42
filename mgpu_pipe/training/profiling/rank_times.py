"""Time of a step on each rank by phase, as ``summary.json`` stores it, and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mgpu_pipe.training.profiling.device_trace import PHASES


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank's step, the mean over the measured steps.

    Attributes:
        own: work without collectives, by phase.
        waiting, transfer: collectives that overlap with no work, by axis: before and after the last rank arrived.
        waits_for: the waiting, by the rank that arrived last.
        callback, callback_s: the slowest callback, and its seconds.
    """

    node: str
    step_s: float
    own: dict[str, float]
    waiting: dict[str, float]
    transfer: dict[str, float]
    waits_for: dict[str, float]
    callback: str
    callback_s: float
    peak_gib: float

    @property
    def own_s(self) -> float:
        return sum(self.own.values())

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    @property
    def transfer_s(self) -> float:
        return sum(self.transfer.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StepTimes:
    """Times of all ranks, in order.

    Attributes:
        first, last: the measured steps.
        findings: conclusions, a sentence each.
    """

    first: int
    last: int
    ranks: list[RankTimes]
    findings: list[str]

    @classmethod
    def read(cls, value: object) -> StepTimes | None:
        """Parse a summary's entry, which may be foreign; None where it is missing or malformed."""
        try:
            assert isinstance(value, Mapping)
            ranks = [_rank_times(rank) for rank in value["ranks"]]
            assert ranks
            return cls(int(value["first"]), int(value["last"]), ranks, [str(line) for line in value["findings"]])
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def axes(self) -> list[str]:
        """Axes with communication, the costliest first."""
        cost: dict[str, float] = {}
        for rank in self.ranks:
            for part in (rank.waiting, rank.transfer):
                for axis, seconds in part.items():
                    cost[axis] = cost.get(axis, 0.0) + seconds
        return sorted(cost, key=lambda axis: -cost[axis])

    def share(self, part: str) -> float:
        """Share of all ranks' steps that ``part`` takes: ``waiting``, ``transfer``, or a phase."""
        seconds = sum(rank.own.get(part, 0.0) if part in PHASES else getattr(rank, f"{part}_s") for rank in self.ranks)
        return seconds / max(sum(rank.step_s for rank in self.ranks), 1e-12)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns and a row for each rank, in milliseconds, then each column's share of the step."""
        axes, nodes = self.axes, len({rank.node for rank in self.ranks}) > 1
        names = ["rank", *(["node"] if nodes else []), "step ms", *PHASES]
        names += [f"{axis}: {part}" for axis in axes for part in ("waits", "transfer")]
        rows, values = [], []
        for number, rank in enumerate(self.ranks):
            spent = [rank.own.get(kind, 0.0) for kind in PHASES]
            spent += [part.get(axis, 0.0) for axis in axes for part in (rank.waiting, rank.transfer)]
            values.append([rank.step_s, *spent])
            most = max(rank.waits_for, key=lambda other: rank.waits_for[other], default="")
            waits_for = f"rank {most}" if most else ""
            rows.append([str(number), *([rank.node] if nodes else []), *map(_milliseconds, values[-1]), waits_for])
        means = [statistics.fmean(column) for column in zip(*values, strict=True)]
        shares = [f"{100 * mean / means[0]:.0f}%" if means[0] else "" for mean in means]
        rows.append(["all", *([""] if nodes else []), *shares, ""])
        return [*names, "waits most for"], rows


def _rank_times(value: Mapping[str, Any]) -> RankTimes:
    parts = {
        name: {str(key): number_of(spent) for key, spent in value[name].items()}
        for name in ("own", "waiting", "transfer", "waits_for")
    }
    figures = {name: number_of(value[name]) for name in ("step_s", "callback_s", "peak_gib")}
    return RankTimes(node=str(value["node"]), callback=str(value["callback"]), **parts, **figures)  # type: ignore[arg-type]


def number_of(value: object) -> float:
    """The finite number ``value`` from a file that may be foreign; a ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"


def slowest(ranks: Sequence[RankTimes]) -> tuple[int, str, float] | None:
    """Rank with the most work, its slowest phase and extra seconds per step; None below a tenth of a step."""
    if len(ranks) < 2:
        return None
    rank = max(range(len(ranks)), key=lambda number: ranks[number].own_s)
    others = [other for number, other in enumerate(ranks) if number != rank]
    behind = {
        kind: ranks[rank].own.get(kind, 0.0) - statistics.median(other.own.get(kind, 0.0) for other in others)
        for kind in PHASES
    }
    late = ranks[rank].own_s - statistics.median(other.own_s for other in others)
    if late < 0.1 * ranks[rank].step_s:
        return None
    return rank, max(behind, key=lambda kind: behind[kind]), late
