"""How context parallelism cuts a micro-batch along its sequence.

The ring cuts a sequence into ``2 * size`` chunks and gives rank ``r`` the chunks ``r`` and ``2 * size - 1 - r``
("zigzag"): under a causal mask a late token has more to look at than an early one, and so every rank has the same work
(Brandon et al. 2023, "Striped Attention", arXiv:2311.09431, for the imbalance; Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2, for these chunks). Ulysses, whose attention sees whole sequences, cuts into ``size`` consecutive ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from mgpu_pipe.data.batch_spec import BatchSpec

Method = Literal["ring", "ulysses"]
Range = tuple[int, int]


def num_chunks(size: int, method: Method) -> int:
    """Chunks that a sequence is cut into; its length is padded to a multiple of them."""
    return 2 * size if method == "ring" else size


def padded_length(length: int, size: int, method: Method) -> int:
    """The least length of at least ``length`` that ``size`` ranks can share."""
    chunks = num_chunks(size, method)
    return -(-length // chunks) * chunks


def chunk_ranges(length: int, size: int, rank: int, method: Method) -> tuple[Range, ...]:
    """``(start, stop)`` of what ``rank`` holds of a padded sequence, in the order in which it holds it."""
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
        spec: says which is which.
        size: ranks that share the sequence.
        rank: of this process among them.

    Returns:
        Tensors of padded length / ``size``. Positions are those in the whole sequence.
    """
    length = padded_length(spec.length(micro_batch), size, method)
    ranges = chunk_ranges(length, size, rank, method)
    part = spec.padded(micro_batch, length)
    for name, value in part.items():
        dim = spec.fields[name].sequence_dim
        if dim is not None:
            part[name] = torch.cat([value.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)
    return part


def document_numbers(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Of every token of rows padded to ``length`` its document's number in the row, from 0 up; padding is the last.

    Args:
        positions: (rows, seq_len) of whole sequences; a document begins wherever they do not go up by one.

    Returns:
        int64 of shape (rows, ``length``) on the CPU: what is to be computed is decided there. A copy from another
        device waits for it, once a micro-batch.
    """
    positions = positions.cpu()
    starts = torch.zeros_like(positions)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    documents = starts.cumsum(-1)
    missing = length - positions.shape[1]
    if missing > 0:
        documents = torch.cat([documents, (documents[:, -1:] + 1).expand(-1, missing)], dim=1)
    return documents
