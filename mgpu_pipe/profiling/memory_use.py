"""How much memory a step takes in each phase, as ``summary.json`` has it, and as a table. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mgpu_pipe.profiling.breakdown import COMPUTE, OPTIMIZER, Phase
from mgpu_pipe.profiling.rank_times import number_of

FORWARD, BACKWARD, REST = "forward", "backward", "rest"
MEMORY_PHASES = (FORWARD, BACKWARD, OPTIMIZER, REST)
GIB = 1 << 30
POINTS = 240
"""Of the line that is kept."""


@dataclass(frozen=True)
class Look:
    """What there was at a moment, in GiB.

    Attributes:
        used: by tensors; on the CPU, by the process.
        held: by the allocator; on the CPU, the same.
        split: of that free, in parts of blocks that the allocator cannot give back: fragmentation.
    """

    at: float
    used: float
    held: float
    split: float


@dataclass(frozen=True)
class RankMemory:
    """The most of each, in GiB.

    Attributes:
        used: by phase.
    """

    used: dict[str, float]
    held: float
    split: float

    @property
    def peak(self) -> float:
        return max(self.used.values())


@dataclass(frozen=True)
class MemoryUse:
    """That of all ranks in order, and a line of one of them.

    Attributes:
        device: ``cuda`` or ``cpu``.
        rank: whose line: the one that used most.
        line: seconds since the first measured step began, GiB used and held, and the phase.
    """

    device: str
    ranks: list[RankMemory]
    rank: int
    line: list[tuple[float, float, float, str]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, value: object) -> MemoryUse | None:
        """From a summary, which somebody else may have written; None where it holds none."""
        try:
            assert isinstance(value, Mapping)
            ranks = [
                RankMemory(
                    {name: number_of(one["used"][name]) for name in MEMORY_PHASES},
                    number_of(one["held"]),
                    number_of(one["split"]),
                )
                for one in value["ranks"]
            ]
            line = [
                (number_of(at), number_of(used), number_of(held), str(phase)) for at, used, held, phase in value["line"]
            ]
            assert ranks and line and all(phase in MEMORY_PHASES for *_, phase in line)
            return cls(str(value["device"]), ranks, int(value["rank"]), line)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def what(self) -> str:
        """What is meant by memory."""
        return "of the device" if self.device == "cuda" else "resident, of the process"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns, and a row for each rank."""
        of_allocator = ["held", "fragmented"] if self.device == "cuda" else []
        rows = []
        for number, one in enumerate(self.ranks):
            values = [*(one.used[name] for name in MEMORY_PHASES), *([one.held, one.split] if of_allocator else [])]
            rows.append([str(number), *(f"{value:.3f}" for value in values)])
        return ["rank", *MEMORY_PHASES, *of_allocator], rows


def phases_of(looks: Sequence[Look], phases: Sequence[Phase], backward: Sequence[tuple[float, float]]) -> list[str]:
    """Of each look its phase; compute is forward until a backward pass begins, and backward from the last one's end.

    Args:
        phases: without gaps, in order; a look belongs to the one that it ends.
        backward: when backward passes ran.
    """
    ends, found = [end for _, end, _ in phases], []
    for look in looks:
        at = bisect_left(ends, look.at)
        begin, end, kind = phases[min(at, len(phases) - 1)]
        if kind == OPTIMIZER:
            found.append(OPTIMIZER)
        elif kind != COMPUTE:
            found.append(REST)
        else:
            within = [span for span in backward if begin <= span[1] and span[0] < end]
            through = not any(span[0] >= look.at for span in within)
            running = any(span[0] < look.at <= span[1] for span in within)
            found.append(BACKWARD if within and (running or through) else FORWARD)
    return found


def rank_memory(looks: Sequence[Look], names: Sequence[str]) -> RankMemory:
    used = {
        name: max((look.used for look, of in zip(looks, names, strict=True) if of == name), default=0.0)
        for name in MEMORY_PHASES
    }
    return RankMemory(used, max(look.held for look in looks), max(look.split for look in looks))


def thinned(looks: Sequence[Look], names: Sequence[str], began: float) -> list[tuple[float, float, float, str]]:
    """A line of at most :data:`POINTS`: of each stretch of looks the one that used most."""
    size = -(-len(looks) // POINTS)
    kept = [
        max(range(at, min(at + size, len(looks))), key=lambda number: looks[number].used)
        for at in range(0, len(looks), size)
    ]
    return [
        (round(looks[at].at - began, 4), round(looks[at].used, 5), round(looks[at].held, 5), names[at]) for at in kept
    ]
