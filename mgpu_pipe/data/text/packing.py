"""Packs pieces of documents into samples.

Documents longer than a sample are cut into whole samples and a remainder. Pieces are packed by best fit in order of
decreasing length (Johnson, 1974; for language models Ding et al., "Fewer Truncations Improve Language Modeling",
2024), so no document is cut that fits. Pieces of equal length are placed together, which makes the work depend on
the number of different lengths rather than on the number of pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.token_store import TokenStore, load_array

# Labels read at once.
_CHUNK_TOKENS = 1 << 22


def label_counts(
    store: TokenStore, packs: Packs, vocab_size: int, samples: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Counts each token as a valid label in ``samples`` (all where None); shape ``(vocab_size,)``."""
    if samples is None:
        pieces = np.arange(len(packs.pieces.start))
    else:
        first = packs.offsets[samples]
        pieces = ranges(first, packs.offsets[samples + 1] - first)
    counts = np.zeros(vocab_size, np.int64)
    step = max(1, _CHUNK_TOKENS // int(packs.pieces.length.max(initial=1)))
    for begin in range(0, len(pieces), step):
        some = packs.pieces.take(pieces[begin : begin + step])
        positions = ranges(some.start + 1, some.length - 1 + some.continues)
        if store.loss_mask is not None:
            positions = positions[store.loss_mask[positions] != 0]
        counts += np.bincount(store.tokens[positions], minlength=vocab_size)
    return counts


def perplexity(training: NDArray[np.int64], counts: NDArray[np.int64]) -> float | None:
    """Perplexity of held-out ``counts``, (vocab_size,), under add-one-smoothed ``training`` frequencies; None without
    any."""
    total = int(counts.sum())
    if not total:
        return None
    log_frequency = np.log(training + 1.0) - np.log(float(training.sum() + len(training)))
    return exp(-float(counts @ log_frequency) / total)


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Runs of tokens that stay together; each lies within one document. Arrays of shape ``(pieces,)``."""

    start: Ints
    """Position of the first token in the token file."""
    length: Ints
    continues: NDArray[np.bool_]
    """The document continues after this piece, so its last token has a label, too."""

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


def cut_documents(
    start: Ints, length: Ints, seq_len: int, rule: str = "split", loss_mask: NDArray[np.uint8] | None = None
) -> Pieces:
    """Cuts documents into pieces of at most ``seq_len`` tokens: whole samples, then the remainder.

    Of a cut document, pieces without labels that count are left out. A single token at a document's end is left out: it
    has no label, and it is the label of the token before.

    Args:
        start: first token of each document, shape ``(documents,)``.
        length: tokens of each document.
        seq_len: tokens a sample.
        rule: of longer documents: ``split`` keeps all pieces, ``truncate`` the first one, ``drop`` none.
        loss_mask: for the token file, 1 where a token counts as a label; None where all do.
    """
    if rule == "drop":
        start, length = start[length <= seq_len], length[length <= seq_len]
    count = -(-length // seq_len)
    document = np.repeat(np.arange(len(length)), count)
    number = ranges(np.zeros_like(count), count)
    piece_start = start[document] + number * seq_len
    end = (start + length)[document]
    piece_length = np.minimum(end - piece_start, seq_len)
    continues = piece_start + piece_length < end
    keeps = (piece_length > 1) | continues
    if rule == "truncate":
        keeps &= number == 0
    useful = np.flatnonzero(keeps)
    if loss_mask is not None and len(useful):
        labels = piece_length[useful] - 1 + continues[useful]
        valid = masked_counts(piece_start[useful] + 1, labels, loss_mask)
        useful = useful[(valid > 0) | (count[document[useful]] == 1)]
    return Pieces(piece_start, piece_length, continues).take(useful)


def ranges(first: Ints, count: Ints) -> Ints:
    """Concatenates ``arange(first[i], first[i] + count[i])`` over all ``i``."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - count), count)


def pack(
    start: Ints,
    length: Ints,
    seq_len: int,
    method: str,
    rule: str = "split",
    loss_mask: NDArray[np.uint8] | None = None,
) -> Packs:
    """Packs documents into samples of ``seq_len`` tokens.

    The result depends only on the arguments: on no seed and no number of processes.

    Args:
        start, length: the documents in the token file, shape ``(documents,)``.
        seq_len: tokens a sample.
        method: ``best_fit``, or ``none``: every piece is a sample.
        rule, loss_mask: see :func:`cut_documents`.
    """
    pieces = cut_documents(start, length, seq_len, rule, loss_mask)
    total = len(pieces.length)
    if method == "none":
        return Packs(np.arange(total + 1), pieces)
    bins = best_fit(pieces.length, seq_len)
    order = np.argsort(bins, kind="stable")
    sizes = np.bincount(bins) if total else np.zeros(0, np.int64)
    return Packs(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), pieces.take(order))


def best_fit(length: Ints, capacity: int) -> Ints:
    """Assigns pieces to bins by best-fit decreasing: the fullest bin with room, else a new one.

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
                # The tightest bin stays the tightest while pieces of this size fit in it.
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
    """Open bins by their room."""

    def __init__(self, capacity: int) -> None:
        self._bins: list[list[Ints]] = [[] for _ in range(capacity + 1)]
        self._rooms: list[int] = []

    def tightest(self, size: int) -> int | None:
        """Least room of a bin that is at least ``size``."""
        index = bisect_left(self._rooms, size)
        return self._rooms[index] if index < len(self._rooms) else None

    def take(self, room: int, number: int) -> Ints:
        """Removes up to ``number`` bins with exactly ``room``, last in first out."""
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
    """Labels that count, (samples,); ``loss_mask`` is 1 in the token file where a token does, None where all do."""
    if not packs.num_samples:
        return np.zeros(0, np.int64)
    pieces = packs.pieces
    count = pieces.length - 1 + pieces.continues
    if loss_mask is not None:
        count = masked_counts(pieces.start + 1, count, loss_mask)
    return np.add.reduceat(count, packs.offsets[:-1])


def masked_counts(first: Ints, count: Ints, mask: NDArray[np.uint8]) -> Ints:
    """Sums ``mask[first[i] : first[i] + count[i]]`` for each ``i``; reads in file order."""
    order = np.argsort(first, kind="stable")
    edges = np.empty(2 * len(first), np.int64)
    edges[0::2] = first[order]
    edges[1::2] = (first + count)[order]
    # An edge at the file's end is left out: the last sum ends there anyway.
    inside = edges[:-1] if edges[-1] == len(mask) else edges
    sums = np.add.reduceat(mask, inside, dtype=np.int64)[0::2]
    counts = np.empty(len(first), np.int64)
    counts[order] = sums
    return counts


def open_packs(folder: Path) -> tuple[Packs, NDArray[np.int64]]:
    """Maps the packs in ``folder`` and each sample's valid tokens into memory."""
    array = {
        name: load_array(folder / f"{name}.npy") for name in ("offsets", "start", "length", "continues", "valid_tokens")
    }
    pieces = Pieces(array["start"], array["length"], array["continues"])
    return Packs(array["offsets"], pieces), array["valid_tokens"]
