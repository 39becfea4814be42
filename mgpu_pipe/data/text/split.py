"""The held-out split: by document, by content, and the same for every run.

A document's place is decided by a keyed hash of its text, with a fixed key: not by the run's seed, so that evaluations
of different runs are comparable, and copies of a document stay on one side.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_KEY = b"mgpu_pipe held-out split 1"


def document_hash(content: str | bytes) -> int:
    """The 64-bit number that decides on which side of the split a document stands."""
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=_KEY).digest(), "little")


def held_out(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Which documents are held out: the ``fraction`` of them, rounded, with the smallest hashes.

    With a fraction above 0 and two documents or more, at least one is held out and at least one is not. Documents
    of equal hash (copies) stay together unless that would leave a side empty.

    Args:
        hashes: shape ``(documents,)``.
        fraction: at least 0, below 1.

    Returns:
        Boolean array of shape ``(documents,)``.
    """
    number = len(hashes)
    chosen = np.zeros(number, dtype=np.bool_)
    if fraction <= 0 or number < 2:
        return chosen
    wanted = min(max(round(fraction * number), 1), number - 1)
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    borders = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    if borders.size and ranked[wanted] == ranked[wanted - 1]:
        below = borders[borders <= wanted]
        wanted = int(below[-1] if below.size else borders[0])
    chosen[order[:wanted]] = True
    return chosen
