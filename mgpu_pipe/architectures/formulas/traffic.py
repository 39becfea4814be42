"""Bytes that a process sends in a collective.

Ring algorithms (Thakur et al. 2005) over n processes: an all-gather, a reduce-scatter or an all-to-all of S bytes sends
S(n-1)/n, an all-reduce twice that.
"""

from __future__ import annotations


def exchanged(size: float, ranks: int) -> float:
    """Bytes that a process sends in an all-gather, reduce-scatter or all-to-all of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def all_reduced(size: float, ranks: int) -> float:
    """Bytes that a process sends in an all-reduce of ``size`` bytes."""
    return 2 * size * (ranks - 1) / ranks
