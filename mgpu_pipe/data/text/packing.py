"""Packing: which pieces of which documents make up a sample.

Documents longer than a sample are cut into whole samples and a remainder. Pieces are packed by best fit in order of
decreasing length (Johnson, 1974; for language models Ding et al., "Fewer Truncations Improve Language Modeling",
2024), so no document is cut that fits. Pieces of equal length are placed together, which makes the work depend on
the number of different lengths rather than on the number of pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.token_store import load_array

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Runs of tokens that stay together; each lies within one document. Arrays of shape ``(pieces,)``."""

    start: Ints
    """Position of the first token in the token file."""
    length: Ints
    continues: NDArray[np.bool_]
    """The document goes on behind this piece, so its last token has a label too."""

    def take(self, order: Ints) -> Pieces:
        return Pieces(self.start[order], self.length[order], self.continues[order])


@dataclass(frozen=True)
class Packs:
    """Samples as rows of pieces: sample ``i`` holds the pieces ``offsets[i] .. offsets[i + 1] - 1``, in that order."""

    offsets: Ints
    """Shape ``(samples + 1,)``."""
    pieces: Pieces

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1


def cut_documents(start: Ints, length: Ints, seq_len: int) -> Pieces:
    """Cut documents into pieces of at most ``seq_len`` tokens: whole samples, then the remainder.

    A single token at a document's end is left out: it would have no label, and it is the label of the token before.

    Args:
        start: first token of each document, shape ``(documents,)``.
        length: tokens of each document.
        seq_len: tokens a sample.
    """
    count = -(-length // seq_len)
    document = np.repeat(np.arange(len(length)), count)
    number = ranges(np.zeros_like(count), count)
    piece_start = start[document] + number * seq_len
    end = (start + length)[document]
    piece_length = np.minimum(end - piece_start, seq_len)
    continues = piece_start + piece_length < end
    useful = np.flatnonzero((piece_length > 1) | continues)
    return Pieces(piece_start, piece_length, continues).take(useful)


def ranges(first: Ints, count: Ints) -> Ints:
    """The concatenation of ``arange(first[i], first[i] + count[i])`` over all ``i``."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - count), count)


def pack(start: Ints, length: Ints, seq_len: int, method: str) -> Packs:
    """Pack documents into samples of ``seq_len`` tokens.

    The result depends on nothing but the arguments: not on a seed, not on the number of processes.

    Args:
        start, length: the documents in the token file, shape ``(documents,)``.
        seq_len: tokens a sample.
        method: ``best_fit``, or ``none``, which gives every piece a sample of its own.
    """
    pieces = cut_documents(start, length, seq_len)
    total = len(pieces.length)
    if method == "none":
        return Packs(np.arange(total + 1), pieces)
    bins = best_fit(pieces.length, seq_len)
    order = np.argsort(bins, kind="stable")
    sizes = np.bincount(bins) if total else np.zeros(0, np.int64)
    return Packs(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), pieces.take(order))


def best_fit(length: Ints, capacity: int) -> Ints:
    """The bin of each piece by best-fit decreasing: the fullest bin that still has room, else a new one.

    Args:
        length: pieces, each at most ``capacity``.
        capacity: room of a bin.

    Returns:
        Bin numbers ``0 .. bins - 1``, in the order in which bins were opened.
    """
    order = np.argsort(-length, kind="stable")
    counts = np.bincount(length, minlength=capacity + 1)
    bins = np.empty(len(length), np.int64)
    room = _OpenBins(capacity)
    opened = placed = 0
    for size in range(capacity, 0, -1):
        left = int(counts[size])
        while left:
            free = room.tightest(size)
            if free is None:
                free, each = capacity, capacity // size
                number = -(-left // each)
                chosen = np.arange(opened, opened + number)
                opened += number
            else:
                # The tightest bin stays the tightest until another piece of this size no longer fits in it.
                each = free // size
                chosen = room.take(free, -(-left // each))
            filled = np.repeat(chosen, each)[:left]
            bins[order[placed : placed + len(filled)]] = filled
            last = len(filled) - each * (len(chosen) - 1)
            room.put(free - each * size, chosen[:-1])
            room.put(free - last * size, chosen[-1:])
            placed += len(filled)
            left -= len(filled)
    return bins


class _OpenBins:
    """Bins that have room, by how much."""

    def __init__(self, capacity: int) -> None:
        self._bins: list[list[Ints]] = [[] for _ in range(capacity + 1)]
        self._rooms: list[int] = []

    def tightest(self, size: int) -> int | None:
        """The least room that some bin has and that is at least ``size``."""
        at = bisect_left(self._rooms, size)
        return self._rooms[at] if at < len(self._rooms) else None

    def take(self, room: int, number: int) -> Ints:
        """Remove up to ``number`` of the bins that have exactly ``room``, the latest put first."""
        stack, taken = self._bins[room], []
        while number and stack:
            chunk = stack.pop()
            if len(chunk) > number:
                stack.append(chunk[:-number])
                chunk = chunk[-number:]
            taken.append(chunk)
            number -= len(chunk)
        if not stack:
            self._rooms.pop(bisect_left(self._rooms, room))
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def put(self, room: int, bins: Ints) -> None:
        if room == 0 or not len(bins):
            return
        if not self._bins[room]:
            insort(self._rooms, room)
        self._bins[room].append(bins)


def valid_tokens(packs: Packs, loss_mask: NDArray[np.uint8] | None) -> Ints:
    """Labels that count, of each sample; shape ``(samples,)``.

    Args:
        packs: the samples.
        loss_mask: of every token of the token file, 1 where it counts as a label; None where all do.
    """
    if not packs.num_samples:
        return np.zeros(0, np.int64)
    pieces = packs.pieces
    count = pieces.length - 1 + pieces.continues
    if loss_mask is not None:
        count = masked_counts(pieces.start + 1, count, loss_mask)
    return np.add.reduceat(count, packs.offsets[:-1])


def masked_counts(first: Ints, count: Ints, mask: NDArray[np.uint8]) -> Ints:
    """The sum of ``mask[first[i] : first[i] + count[i]]`` for each ``i``, read in the file's order."""
    order = np.argsort(first, kind="stable")
    edges = np.empty(2 * len(first), np.int64)
    edges[0::2] = first[order]
    edges[1::2] = (first + count)[order]
    # An edge at the file's end is where the last sum stops by itself.
    inside = edges[:-1] if edges[-1] == len(mask) else edges
    sums = np.add.reduceat(mask, inside, dtype=np.int64)[0::2]
    found = np.empty(len(first), np.int64)
    found[order] = sums
    return found


def open_packs(folder: Path) -> tuple[Packs, NDArray[np.int64]]:
    """The packs in ``folder`` and each sample's valid tokens, mapped into memory."""
    array = {
        name: load_array(folder / f"{name}.npy") for name in ("offsets", "start", "length", "continues", "valid_tokens")
    }
    pieces = Pieces(array["start"], array["length"], array["continues"])
    return Packs(array["offsets"], pieces), array["valid_tokens"]
