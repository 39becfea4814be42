"""Measures the link of each pair of ranks: round trips of a few bytes, and large messages both ways.

Pairs run in the rounds of a tournament, so that no rank is in two pairs at once. Slow pairs are measured once more,
alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.host_bytes import exchange_json
from mgpu_pipe.runs.lock import boot_id
from mgpu_pipe.training.profiling.link_table import Link, suspects

TRIPS, TRANSFERS = 10, 3
"""Repetitions, of which the best counts: a busy machine has pauses."""
MIB = 1 << 20
MESSAGE = {"cpu": 8 * MIB, "cuda": 64 * MIB}
"""Bytes of a large message."""


def measure_links(device: torch.device) -> list[Link]:
    """The links of all pairs, on every rank. Collective."""
    nodes = exchange_json([socket.gethostname(), boot_id()], None)

    def measured(rounds: Iterator[Sequence[tuple[int, int]]]) -> list[Link]:
        links_here = []
        for pairs in rounds:
            _barrier(device)
            for pair in pairs:
                if dist.get_rank() in pair:
                    trip, rate = _measure(*pair, device)
                    (node, boot), (other, other_boot) = (nodes[rank] for rank in pair)
                    links_here.append(Link(*pair, node, other, boot == other_boot, trip / 2, rate))
        by_rank = exchange_json([asdict(link) for link in links_here if link.first == dist.get_rank()], None)
        return [Link(**link) for links in by_rank for link in links]

    links = {(link.first, link.second): link for link in measured(tournament(dist.get_world_size()))}
    for again in measured(iter([[(link.first, link.second)] for link in suspects([*links.values()])])):
        links[again.first, again.second] = links[again.first, again.second].best(again)
    return [links[pair] for pair in sorted(links)]


def tournament(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every rank is in one pair at most; each pair comes once."""
    players = list(range(ranks + ranks % 2))  # an odd number gets a dummy player; its partner pauses
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < ranks]
        players[1:] = [players[-1], *players[1:-1]]


def _measure(first: int, second: int, device: torch.device) -> tuple[float, float]:
    """A round trip's seconds, and bytes per second in the slower direction. Both ranks of the pair call this."""
    small = torch.zeros(1, device=device)
    large = torch.zeros(MESSAGE[device.type] // 4, device=device)
    leads = dist.get_rank() == first
    other = second if leads else first

    def exchange(there: torch.Tensor, back: torch.Tensor) -> None:
        if leads:
            dist.send(there, other)
            dist.recv(back, other)
        else:
            dist.recv(there, other)
            dist.send(back, other)

    _timed(lambda: exchange(large, large), device)  # connects
    trip = min(_timed(lambda: exchange(small, small), device) for _ in range(TRIPS))
    slower = max(
        min(_timed(lambda: exchange(there, back), device) for _ in range(TRANSFERS))  # noqa: B023
        for there, back in ((large, small), (small, large))
    )
    return trip, large.nbytes / slower


def _timed(exchange: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    exchange()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _barrier(device: torch.device) -> None:
    dist.all_reduce(zero := torch.zeros((), device=device))
    zero.item()
