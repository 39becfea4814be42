"""Memory of a step in each phase, as ``summary.json`` stores it, and as a table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mgpu_pipe.training.profiling.device_trace import COMPUTE, OPTIMIZER, Phase
from mgpu_pipe.training.profiling.rank_times import number_of

FORWARD, BACKWARD, REST = "forward", "backward", "rest"
MEMORY_PHASES = (FORWARD, BACKWARD, OPTIMIZER, REST)
GIB = 1 << 30
POINTS = 240
"""Most points of the stored line."""


@dataclass(frozen=True)
class MemorySample:
    """One sample of memory, in GiB.

    Attributes:
        moment: seconds by ``time.perf_counter``.
        used: by tensors; on the CPU, by the process.
        reserved: by the allocator; on the CPU, the same.
        split: the part of it that is free, in parts of blocks that the allocator cannot give back: fragmentation.
    """

    moment: float
    used: float
    reserved: float
    split: float


@dataclass(frozen=True)
class RankMemory:
    """A rank's peaks, in GiB.

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
    """Memory of all ranks in order, and the timeline of one of them.

    Attributes:
        device: ``cuda`` or ``cpu``.
        rank: the owner of the line: the rank that used most.
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
        """Parse a summary's entry, which may be foreign; None where it is missing or malformed."""
        try:
            assert isinstance(value, Mapping)
            ranks = [
                RankMemory(
                    {name: number_of(rank["used"][name]) for name in MEMORY_PHASES},
                    number_of(rank["held"]),
                    number_of(rank["split"]),
                )
                for rank in value["ranks"]
            ]
            line = [
                (number_of(seconds), number_of(used), number_of(reserved), str(phase))
                for seconds, used, reserved, phase in value["line"]
            ]
            assert ranks and line and all(phase in MEMORY_PHASES for *_, phase in line)
            return cls(str(value["device"]), ranks, int(value["rank"]), line)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def what(self) -> str:
        """The kind of memory, in words."""
        return "of the device" if self.device == "cuda" else "resident, of the process"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns, and a row for each rank."""
        of_allocator = ["held", "fragmented"] if self.device == "cuda" else []
        rows = []
        for number, rank in enumerate(self.ranks):
            values = [*(rank.used[name] for name in MEMORY_PHASES), *([rank.held, rank.split] if of_allocator else [])]
            rows.append([str(number), *(f"{value:.3f}" for value in values)])
        return ["rank", *MEMORY_PHASES, *of_allocator], rows


def phases_of_samples(
    samples: Sequence[MemorySample], phases: Sequence[Phase], backward: Sequence[tuple[float, float]]
) -> list[str]:
    """The phase of each sample; compute is backward during a backward pass and after the last one, else forward.

    Args:
        phases: without gaps, in order; a sample belongs to the one that it ends.
        backward: when backward passes ran.
    """
    ends, names = [end for _, end, _ in phases], []
    for sample in samples:
        index = bisect_left(ends, sample.moment)
        begin, end, kind = phases[min(index, len(phases) - 1)]
        if kind == OPTIMIZER:
            names.append(OPTIMIZER)
        elif kind != COMPUTE:
            names.append(REST)
        else:
            within = [span for span in backward if begin <= span[1] and span[0] < end]
            through = not any(span[0] >= sample.moment for span in within)
            running = any(span[0] < sample.moment <= span[1] for span in within)
            names.append(BACKWARD if within and (running or through) else FORWARD)
    return names


def rank_memory(samples: Sequence[MemorySample], names: Sequence[str]) -> RankMemory:
    used = {
        name: max((sample.used for sample, phase in zip(samples, names, strict=True) if phase == name), default=0.0)
        for name in MEMORY_PHASES
    }
    return RankMemory(used, max(sample.reserved for sample in samples), max(sample.split for sample in samples))


def thin_samples(
    samples: Sequence[MemorySample], names: Sequence[str], began: float
) -> list[tuple[float, float, float, str]]:
    """A timeline of at most :data:`POINTS` samples: from each stretch the one that used most."""
    size = -(-len(samples) // POINTS)
    indices = [
        max(range(start, min(start + size, len(samples))), key=lambda number: samples[number].used)
        for start in range(0, len(samples), size)
    ]
    return [
        (
            round(samples[index].moment - began, 4),
            round(samples[index].used, 5),
            round(samples[index].reserved, 5),
            names[index],
        )
        for index in indices
    ]
