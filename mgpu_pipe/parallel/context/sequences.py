"""Which queries of a rank see which keys: rectangles without a mask, from the documents of whole sequences.

Documents are runs of consecutive tokens, and every rank holds its tokens in their order. So attention that is causal
and stays inside documents falls into few pieces that need no mask at all:

* of a rank's own keys, one causal square for each document;
* of an earlier chunk's keys, all that belong to its last document, for all the queries of that same document: the
  only document that can reach from one chunk into another.

Nothing quadratic is ever stored, and what nobody sees is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import BatchSpec
from mgpu_pipe.parallel.device_memory import to_device

Method = Literal["ring", "ulysses"]
Range = tuple[int, int]


def num_chunks(size: int, method: Method) -> int:
    """Number of chunks that a sequence is cut into; its length is padded to a multiple of it."""
    return 2 * size if method == "ring" else size


def padded_length(length: int, size: int, method: Method) -> int:
    """The least length of at least ``length`` that ``size`` ranks can share."""
    chunks = num_chunks(size, method)
    return -(-length // chunks) * chunks


def chunk_ranges(length: int, size: int, rank: int, method: Method) -> tuple[Range, ...]:
    """``(start, stop)`` of each chunk of a padded sequence that ``rank`` holds, in the rank's order."""
    each = length // num_chunks(size, method)
    owned = (rank, 2 * size - 1 - rank) if method == "ring" else (rank,)
    return tuple((chunk * each, (chunk + 1) * each) for chunk in owned)


def split_micro_batch(
    micro_batch: Mapping[str, torch.Tensor], spec: BatchSpec, size: int, rank: int, method: Method
) -> dict[str, torch.Tensor]:
    """This rank's part of a micro-batch.

    Args:
        micro_batch: fields along the sequence, which are cut, and others, which stay. A length that does not divide is
            padded with a document that counts nothing.
        spec: says which fields are along the sequence.
        size: number of ranks that share the sequence.
        rank: rank of this process among them.

    Returns:
        Tensors of padded length / ``size``. Positions are those in the whole sequence.
    """
    length = padded_length(spec.length(micro_batch), size, method)
    ranges = chunk_ranges(length, size, rank, method)
    part = spec.pad(micro_batch, length)
    for name, value in part.items():
        dim = spec.fields[name].sequence_dim
        if dim is not None:
            part[name] = torch.cat([value.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)
    return part


def document_numbers(positions: torch.Tensor, length: int) -> torch.Tensor:
    """The number of each token's document in its row, from 0 up; padding to ``length`` is the last document.

    Args:
        positions: (rows, seq_len) of whole sequences; a document begins wherever they do not go up by one.

    Returns:
        int64 of shape (rows, ``length``) on the CPU, which decides what is computed. Positions on another device
        cost one host sync a micro-batch.
    """
    positions = positions.cpu()
    starts = torch.zeros_like(positions)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    documents = starts.cumsum(-1)
    missing = length - positions.shape[1]
    if missing > 0:
        documents = torch.cat([documents, (documents[:, -1:] + 1).expand(-1, missing)], dim=1)
    return documents


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
    """The blocks of queries and keys that one attention call computes.

    Attributes:
        blocks: disjoint in their queries.
        causal: every block is a square in which a query sees its own key and those before.
    """

    blocks: tuple[Block, ...]
    causal: bool
    _packings: dict[torch.device, Packing] = field(default_factory=dict, repr=False)

    def packing(self, rows: int, num_queries: int, num_keys: int, device: torch.device) -> Packing:
        """The blocks end to end, for queries of shape (rows, num_queries); built once per micro-batch and device."""
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
    """Blocks of causal attention within whole sequences; ``documents`` come from :func:`document_numbers`."""
    return Blocks(_merge_rows([_squares(row) for row in documents]), causal=True)


def ring_blocks(documents: torch.Tensor, size: int, rank: int) -> tuple[Blocks, ...]:
    """The blocks, by hop, of ``rank``'s queries and the keys of rank ``(rank - hop) % size``.

    Args:
        documents: (rows, padded seq_len), from :func:`document_numbers`.
    """
    local = _local_documents(documents, size, rank)
    half = local.shape[1] // 2
    blocks = [whole_blocks(local)]
    for hop in range(1, size):
        source = (rank - hop) % size
        remote = _local_documents(documents, size, source)
        # A source before this rank has its early chunk before all queries, and its late one after all of them. A source
        # after this rank has both chunks before the late queries, and after the early ones.
        shared = []
        for queries, keys in zip(local, remote, strict=True):
            if source < rank:
                shared.append(_rectangle(queries, keys[:half], 0, keys[half - 1]))
            else:
                shared.append(_rectangle(queries[half:], keys, half, queries[half]))
        blocks.append(Blocks(_merge_rows(shared), causal=False))
    return tuple(blocks)


def _local_documents(documents: torch.Tensor, size: int, rank: int) -> torch.Tensor:
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
    """The one block of ``document`` in ordered rows; empty where the queries or the keys lack it."""
    query_range, key_range = _run(queries, document), _run(keys, document)
    if not _length(query_range) or not _length(key_range):
        return []
    return [((query_range[0] + first_query, query_range[1] + first_query), key_range)]


def _run(row: torch.Tensor, document: torch.Tensor) -> Range:
    row = row.contiguous()
    value = document.reshape(1)
    return int(torch.searchsorted(row, value)), int(torch.searchsorted(row, value, right=True))


def _merge_rows(by_row: Sequence[list[tuple[Range, Range]]]) -> tuple[Block, ...]:
    """The blocks of all rows; consecutive rows with equal ranges share blocks."""
    blocks: list[Block] = []
    first = 0
    for row in range(1, len(by_row) + 1):
        if row == len(by_row) or by_row[row] != by_row[first]:
            blocks += [Block((first, row), queries, keys) for queries, keys in by_row[first]]
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


@dataclass(eq=False)
class ContextAxis:
    """The ranks that share sequences, and their attention method."""

    group: dist.ProcessGroup
    method: Method
    spec: BatchSpec
    """Describes the micro-batches that are cut."""

    def __post_init__(self) -> None:
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.name = f"{self.method} {self.group.group_name}"
        _axes[self.name] = self


@dataclass(eq=False)
class SequenceContext:
    """The sequences of one micro-batch."""

    axis: ContextAxis
    documents: torch.Tensor
    """See :func:`~mgpu_pipe.parallel.context.sequences.document_numbers`."""

    @classmethod
    def from_micro_batch(cls, micro_batch: Mapping[str, torch.Tensor], axis: ContextAxis) -> SequenceContext:
        """The sequences of a whole micro-batch."""
        positions = axis.spec.documents_of(micro_batch)
        return cls(axis, document_numbers(positions, padded_length(positions.shape[1], axis.size, axis.method)))

    @property
    def tokens(self) -> int:
        """Number of tokens of a row on this rank."""
        return self.documents.shape[1] // self.axis.size

    @cached_property
    def by_hop(self) -> tuple[Blocks, ...]:
        return ring_blocks(self.documents, self.axis.size, self.axis.rank)

    @cached_property
    def whole(self) -> Blocks:
        return whole_blocks(self.documents)


_axes: dict[str, ContextAxis] = {}
_contexts: dict[int, SequenceContext] = {}
"""Contexts of the current step by the address of their documents, which stay alive here and so keep that address."""


def sequences_of(documents: torch.Tensor, axis: str) -> SequenceContext:
    """The sequences with these ``documents`` on the axis called ``axis``."""
    address = documents.data_ptr()
    context = _contexts.get(address)
    if context is None or context.axis.name != axis or context.documents.shape != documents.shape:
        context = _contexts[address] = SequenceContext(_axes[axis], documents)
    return context


def forget_sequences() -> None:
    """Drops the step's contexts; call it after the backward passes of a step, or after an evaluation."""
    _contexts.clear()
