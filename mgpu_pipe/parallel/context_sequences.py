"""What the attention of context parallelism has to know of a micro-batch's sequences, beyond a rank's own tokens.

Compiled code calls attention as an operator, to which it hands nothing but tensors, numbers and texts: so sequences are
found again by the tensor of their documents, and axes by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from mgpu_pipe.data.batch_spec import BatchSpec
from mgpu_pipe.parallel.context_blocks import Blocks, ring_blocks, whole_blocks
from mgpu_pipe.parallel.context_split import Method, document_numbers, padded_length


@dataclass(eq=False)
class ContextAxis:
    """The ranks that share sequences, and how."""

    group: dist.ProcessGroup
    method: Method
    spec: BatchSpec
    """Of the micro-batches that are cut."""

    def __post_init__(self) -> None:
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.name = f"{self.method} {self.group.group_name}"
        _axes[self.name] = self


@dataclass(eq=False)
class SequenceContext:
    """The sequences of one micro-batch."""

    axis: ContextAxis
    documents: torch.Tensor
    """See :func:`~mgpu_pipe.parallel.context_split.document_numbers`."""

    @classmethod
    def of(cls, micro_batch: Mapping[str, torch.Tensor], axis: ContextAxis) -> SequenceContext:
        """Of a whole micro-batch."""
        positions = axis.spec.documents_of(micro_batch)
        return cls(axis, document_numbers(positions, padded_length(positions.shape[1], axis.size, axis.method)))

    @property
    def tokens(self) -> int:
        """Of a row on this rank."""
        return self.documents.shape[1] // self.axis.size

    @cached_property
    def by_hop(self) -> tuple[Blocks, ...]:
        return ring_blocks(self.documents, self.axis.size, self.axis.rank)

    @cached_property
    def whole(self) -> Blocks:
        return whole_blocks(self.documents)


_axes: dict[str, ContextAxis] = {}
_found: dict[int, SequenceContext] = {}
"""Those of a step, by the address of their documents, which are kept alive here: no other tensor has it."""


def sequences_of(documents: torch.Tensor, axis: str) -> SequenceContext:
    """The sequences with these ``documents``, for the ``axis`` of that name."""
    address = documents.data_ptr()
    known = _found.get(address)
    if known is None or known.axis.name != axis or known.documents.shape != documents.shape:
        known = _found[address] = SequenceContext(_axes[axis], documents)
    return known


def forget_sequences() -> None:
    """To be called when a step's backward passes, or an evaluation, have ended."""
    _found.clear()
