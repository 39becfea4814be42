"""The links of all pairs of ranks as a table, and which of them are slow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgpu_pipe.topology import AXES, ParallelDims

EVERYONE = "all ranks"
ALL_TO_ALL = "all-to-all"
EXPERTS = {"ep": "ep", "expert_shard": "dp_shard"}
"""Groups of experts, as :class:`~mgpu_pipe.topology.Meshes` describes them."""


def axis_of(dims: ParallelDims, ranks: Sequence[int], described: str = "", kind: str = "") -> str:
    """The axes along which ``ranks`` differ; :data:`EVERYONE` for a world of several axes.

    Args:
        described: torch's description of the group. An expert group has the ranks of other axes.
        kind: of the collective. An all-to-all along other axes than ``cp`` carries experts' tokens, also in a group
            that other axes share with ``ep``.
    """
    if described in EXPERTS and dims.ep > 1:
        return EXPERTS[described]
    positions = [dims.coordinates(rank) for rank in ranks]
    apart = [axis for axis in AXES if len({position[axis] for position in positions}) > 1]
    if kind == ALL_TO_ALL and dims.ep > 1 and "cp" not in apart:
        return "ep"
    if len(apart) > 1 and len(ranks) == dims.world_size:
        return EVERYONE
    return " x ".join(apart) or EVERYONE


MIB = 1 << 20
SLOW = 2.0
"""A link is slow that is this many times slower than the median of its kind."""
LEAST_LATE_S = 50e-6
"""A slow latency also exceeds the median by this."""
MOST_AGAIN = 8
MOST_ROWS = 28
"""Most links to measure once more; most links to list, the slowest first."""


@dataclass(frozen=True)
class Link:
    """The connection between two ranks.

    Attributes:
        near: both ranks are on one machine.
        latency_s: one way.
        rate: bytes per second in the slower direction.
    """

    first: int
    second: int
    first_node: str
    second_node: str
    near: bool
    latency_s: float
    rate: float

    @property
    def name(self) -> str:
        nodes = f"node {self.first_node}" if self.near else f"nodes {self.first_node} and {self.second_node}"
        return f"ranks {self.first} and {self.second} ({nodes})"

    @property
    def figures(self) -> str:
        return f"{self.rate / MIB:.0f} MiB/s, {self.latency_s * 1e6:.0f} us"

    def best(self, other: Link) -> Link:
        """The better latency and rate of two measurements of the same link."""
        return replace(self, latency_s=min(self.latency_s, other.latency_s), rate=max(self.rate, other.rate))


def slowness(links: Sequence[Link]) -> dict[Link, float]:
    """Each link's slowness factor against the median of its kind: on one machine, or between machines."""
    factors = {}
    for near in (True, False):
        kind = [link for link in links if link.near == near]
        if kind:
            rate, latency = (
                statistics.median(values) for values in zip(*((x.rate, x.latency_s) for x in kind), strict=True)
            )
            for link in kind:
                late = link.latency_s / latency if link.latency_s - latency > LEAST_LATE_S else 1.0
                factors[link] = max(rate / link.rate, late)
    return factors


def suspects(links: Sequence[Link]) -> list[Link]:
    """The slow links, the slowest first, at most :data:`MOST_AGAIN`."""
    factors = slowness(links)
    return sorted((link for link in links if factors[link] > SLOW), key=lambda link: -factors[link])[:MOST_AGAIN]


def table(links: Sequence[Link]) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for each link, or for the slowest ones."""
    factors = slowness(links)
    listed = links if len(links) <= MOST_ROWS else sorted(links, key=lambda link: -factors[link])[:MOST_ROWS]
    rows = [
        [
            f"{link.first} - {link.second}",
            link.first_node if link.near else f"{link.first_node} - {link.second_node}",
            f"{link.latency_s * 1e6:.0f}",
            f"{link.rate / MIB:.0f}",
            "SLOW" if factors[link] > SLOW else "",
        ]
        for link in listed
    ]
    return ["ranks", "node", "latency us", "MiB/s", ""], rows


def verdict(links: Sequence[Link]) -> list[str]:
    """A line for each slow link, or for a rank whose links are all slow."""
    slow = suspects(links)
    if len(links) == 1:
        return ["one link has none to compare it with"]
    if not slow:
        return [f"no link is slower than the median by more than {SLOW:g} times"]
    ends = Counter(rank for link in slow for rank in (link.first, link.second))
    world = 1 + max(link.second for link in links)
    lines = []
    for rank, count in ends.items():
        if count == world - 1 > 1:
            of_rank = next(link for link in slow if rank in (link.first, link.second))
            node = of_rank.first_node if of_rank.first == rank else of_rank.second_node
            lines.append(f"all links of rank {rank} (node {node}) are slow: look at its network card and its cable")
            slow = [link for link in slow if rank not in (link.first, link.second)]
    for link in slow:
        kind = [other for other in links if other.near == link.near and other != link]
        usual = replace(
            link,
            rate=statistics.median(other.rate for other in kind),
            latency_s=statistics.median(other.latency_s for other in kind),
        )
        lines.append(f"the link of {link.name} is slow: {link.figures}; the median of the others is {usual.figures}")
    return lines
