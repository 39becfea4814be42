"""The links of all pairs of ranks as a table, and which of them are slow. No torch here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20
SLOW = 2.0
"""Times slower than the median of its kind makes a link slow."""
LEAST_LATE_S = 50e-6
"""A latency is slow where it is larger by this too."""
MOST_AGAIN = 8
MOST_ROWS = 28
"""Links that are measured once more; links that are shown, the slowest first where there are more."""


@dataclass(frozen=True)
class Link:
    """What lies between two ranks.

    Attributes:
        near: they are on one machine.
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
        """Of two measurements of the same link."""
        return replace(self, latency_s=min(self.latency_s, other.latency_s), rate=max(self.rate, other.rate))


def slowness(links: Sequence[Link]) -> dict[Link, float]:
    """How many times slower than the median of the links on one machine, or between machines, each of them is."""
    found = {}
    for near in (True, False):
        kind = [link for link in links if link.near == near]
        if kind:
            rate, latency = (
                statistics.median(values) for values in zip(*((x.rate, x.latency_s) for x in kind), strict=True)
            )
            for link in kind:
                late = link.latency_s / latency if link.latency_s - latency > LEAST_LATE_S else 1.0
                found[link] = max(rate / link.rate, late)
    return found


def suspects(links: Sequence[Link]) -> list[Link]:
    """The slow ones, the slowest first, at most :data:`MOST_AGAIN`."""
    by = slowness(links)
    return sorted((link for link in links if by[link] > SLOW), key=lambda link: -by[link])[:MOST_AGAIN]


def table(links: Sequence[Link]) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row for each link, or for the slowest ones."""
    by = slowness(links)
    shown = links if len(links) <= MOST_ROWS else sorted(links, key=lambda link: -by[link])[:MOST_ROWS]
    rows = [
        [
            f"{link.first} - {link.second}",
            link.first_node if link.near else f"{link.first_node} - {link.second_node}",
            f"{link.latency_s * 1e6:.0f}",
            f"{link.rate / MIB:.0f}",
            "SLOW" if by[link] > SLOW else "",
        ]
        for link in shown
    ]
    return ["ranks", "node", "latency us", "MiB/s", ""], rows


def verdict(links: Sequence[Link]) -> list[str]:
    """The slow links, or the rank whose links are all slow, in a line each."""
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
