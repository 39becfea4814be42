"""Which queries of a rank see which keys: rectangles without a mask, from the documents of whole sequences.

Documents are runs of consecutive tokens, and every rank holds its tokens in their order. So attention that is causal
and stays inside documents falls into few pieces that need no mask at all:

* of a rank's own keys, one causal square for each document;
* of an earlier chunk's keys, all that belong to its last document, for all the queries of that same document: the
  only document that can reach from one chunk into another.

Nothing quadratic is ever stored, and what nobody sees is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from mgpu_pipe.parallel.context_split import Range, chunk_ranges
from mgpu_pipe.parallel.to_device import to_device


class Block(NamedTuple):
    """Ranges of rows, of this rank's queries and of some rank's keys; every such query sees every such key."""

    rows: Range
    queries: Range
    keys: Range


class Packing(NamedTuple):
    """Blocks laid end to end for the operators of sequences of varying lengths; tokens count over rows end to end.

    ``None`` as an index means that all tokens are taken, in their order.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int


@dataclass(eq=False)
class Blocks:
    """What one attention call computes.

    Attributes:
        blocks: no query twice.
        causal: every block is a square in which a query sees its own key and those before.
    """

    blocks: tuple[Block, ...]
    causal: bool
    _packings: dict[torch.device, Packing] = field(default_factory=dict, repr=False)

    def packing(self, rows: int, num_queries: int, num_keys: int, device: torch.device) -> Packing:
        """The blocks end to end, for queries of shape (rows, num_queries); made once a micro-batch and device."""
        if device not in self._packings:
            each = [(row, block) for block in self.blocks for row in range(*block.rows)]
            self._packings[device] = Packing(
                _index([(row, block.queries) for row, block in each], rows, num_queries, device),
                _index([(row, block.keys) for row, block in each], rows, num_keys, device),
                _starts([_length(block.queries) for _, block in each], device),
                _starts([_length(block.keys) for _, block in each], device),
                max(_length(block.queries) for _, block in each),
                max(_length(block.keys) for _, block in each),
            )
        return self._packings[device]


def whole_blocks(documents: torch.Tensor) -> Blocks:
    """Attention of whole sequences to themselves; ``documents`` as of ``document_numbers``."""
    return Blocks(_of_rows([_squares(row) for row in documents]), causal=True)


def ring_blocks(documents: torch.Tensor, size: int, rank: int) -> tuple[Blocks, ...]:
    """What ``rank``'s queries see of the keys of rank ``(rank - hop) % size``, by hop.

    Args:
        documents: (rows, padded seq_len) of ``document_numbers``.
    """
    own = _held(documents, size, rank)
    half = own.shape[1] // 2
    blocks = [whole_blocks(own)]
    for hop in range(1, size):
        source = (rank - hop) % size
        theirs = _held(documents, size, source)
        # Of a source before this rank the early chunk is before all queries, and the late one after all of them. Of a
        # source after it both are before the late queries, and after the early ones.
        shared = []
        for mine, keys in zip(own, theirs, strict=True):
            if source < rank:
                shared.append(_rectangle(mine, keys[:half], 0, keys[half - 1]))
            else:
                shared.append(_rectangle(mine[half:], keys, half, mine[half]))
        blocks.append(Blocks(_of_rows(shared), causal=False))
    return tuple(blocks)


def _held(documents: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    ranges = chunk_ranges(documents.shape[1], size, rank, "ring")
    return torch.cat([documents[:, start:stop] for start, stop in ranges], dim=1)


def _squares(row: torch.Tensor) -> list[tuple[Range, Range]]:
    """A causal square for every document of an ordered ``row``."""
    _, lengths = torch.unique_consecutive(row, return_counts=True)
    edges = [0, *accumulate(lengths.tolist())]
    return [(span, span) for span in pairwise(edges)]


def _rectangle(
    queries: torch.Tensor, keys: torch.Tensor, first_query: int, document: torch.Tensor
) -> list[tuple[Range, Range]]:
    """What belongs to ``document`` in ordered rows; nothing where one of them has none of it."""
    query_range, key_range = _run(queries, document), _run(keys, document)
    if not _length(query_range) or not _length(key_range):
        return []
    return [((query_range[0] + first_query, query_range[1] + first_query), key_range)]


def _run(row: torch.Tensor, document: torch.Tensor) -> Range:
    row = row.contiguous()
    value = document.reshape(1)
    return int(torch.searchsorted(row, value)), int(torch.searchsorted(row, value, right=True))


def _of_rows(of_row: Sequence[list[tuple[Range, Range]]]) -> tuple[Block, ...]:
    """Blocks of every row; rows that follow one another and are cut alike share theirs."""
    blocks: list[Block] = []
    first = 0
    for row in range(1, len(of_row) + 1):
        if row == len(of_row) or of_row[row] != of_row[first]:
            blocks += [Block((first, row), queries, keys) for queries, keys in of_row[first]]
            first = row
    return tuple(blocks)


def _length(span: Range) -> int:
    return span[1] - span[0]


def _index(spans: list[tuple[int, Range]], rows: int, width: int, device: torch.device) -> torch.Tensor | None:
    pieces = [torch.arange(row * width + start, row * width + stop) for row, (start, stop) in spans]
    index = torch.cat(pieces)
    if len(index) == rows * width and torch.equal(index, torch.arange(rows * width)):
        return None
    return to_device(index, device)


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
