"""The held-out split: by document content, and the same for every run.

A keyed hash of its text decides a document's side. The key is fixed and not the run's seed, so evaluations of different
runs are comparable, and copies of a document stay on one side. So do conversations that show the same pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.documents import LongText

_KEY = b"mgpu_pipe held-out split 1"
_BYTES_A_READ = 1 << 20
"""Characters hashed at once."""


def document_hash(content: str | bytes | LongText) -> int:
    """64-bit hash that decides a document's side of the split."""
    digest = hashlib.blake2b(digest_size=8, key=_KEY)
    for start in range(0, len(content), _BYTES_A_READ):  # avoids a second copy of a long text
        part = content[start : start + _BYTES_A_READ]
        digest.update(part.encode() if isinstance(part, str) else part)
    return int.from_bytes(digest.digest(), "little")


def held_out(hashes: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Chooses the held-out documents: the ``fraction`` of them, rounded, with the smallest hashes.

    With a fraction above 0 and at least two documents, both sides have at least one. Documents of equal hash (copies)
    stay together unless that leaves a side empty.

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


def held_out_groups(hashes: NDArray[np.uint64], fraction: float, leaders: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Chooses like :func:`held_out`, (documents,), each on the side of its group's leader; divides a single group."""
    alone = held_out(hashes, fraction)
    chosen = alone[leaders]
    if alone.any() and (chosen.all() or not chosen.any()):
        groups, which = np.unique(leaders, return_inverse=True)
        chosen = alone if len(groups) == 1 else held_out(hashes[groups], fraction)[which.reshape(-1)]
    return chosen


def first_of_groups(contents: Sequence[Iterable[Hashable]], keys: Sequence[str]) -> NDArray[np.int64] | None:
    """Leader of each document's group: documents that share content, directly or through others.

    Args:
        contents: of each document.
        keys: that decide each document's side; the leader has the smallest of its group.

    Returns:
        Shape ``(documents,)``; None where the documents of every group share one key.
    """
    parents, first = list(range(len(keys))), dict[Hashable, int]()

    def root(member: int) -> int:
        while parents[member] != member:
            parents[member] = parents[parents[member]]
            member = parents[member]
        return member

    for document, document_contents in enumerate(contents):
        for content in document_contents:
            mine, other = root(first.setdefault(content, document)), root(document)
            # The smallest key leads; the order of documents does not matter.
            least, most = sorted((mine, other), key=lambda member: (keys[member], member))
            parents[most] = least
    leaders = [root(document) for document in range(len(keys))]
    if all(keys[leader] == key for leader, key in zip(leaders, keys, strict=True)):
        return None
    return np.array(leaders, np.int64)
