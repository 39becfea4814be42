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
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX

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


def pad_micro_batch(micro_batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """``micro_batch`` with rows of at least ``length`` tokens; what is added is a document that counts nothing."""
    present = micro_batch["input_ids"].shape[1]
    missing = length - present
    if missing <= 0:
        return dict(micro_batch)
    padded = {}
    for name, value in micro_batch.items():
        if not _along_the_sequence(value, present):
            padded[name] = value
        elif name == "position_ids":
            # Positions that begin again are a document of its own, as padding is everywhere.
            tail = torch.arange(missing, dtype=value.dtype, device=value.device).expand(value.shape[0], -1)
            padded[name] = torch.cat([value, tail], dim=1)
        else:
            around = [0, 0] * (value.dim() - 2) + [0, missing]
            padded[name] = F.pad(value, around, value=IGNORE_INDEX if name == "labels" else 0)
    return padded


def split_micro_batch(
    micro_batch: Mapping[str, torch.Tensor], size: int, rank: int, method: Method
) -> dict[str, torch.Tensor]:
    """This rank's part of a micro-batch.

    Args:
        micro_batch: tensors of shape (rows, seq_len, ...), which are cut, and others, which stay; see
            :class:`~mgpu_pipe.data.step_batch.StepBatch`. A length that does not divide is padded with tokens that
            count nothing.
        size: ranks that share the sequence.
        rank: of this process among them.

    Returns:
        Tensors of shape (rows, padded seq_len / size, ...). The positions are those in the whole sequence.
    """
    present = micro_batch["input_ids"].shape[1]
    length = padded_length(present, size, method)
    ranges = chunk_ranges(length, size, rank, method)
    return {
        name: torch.cat([value[:, start:stop] for start, stop in ranges], dim=1)
        if _along_the_sequence(value, length)
        else value
        for name, value in pad_micro_batch(micro_batch, length).items()
    }


def document_numbers(position_ids: torch.Tensor, length: int) -> torch.Tensor:
    """Of every token of rows padded to ``length`` its document's number in the row, from 0 up; padding is the last.

    Args:
        position_ids: (rows, seq_len) of whole sequences; a document begins wherever they do not go up by one.

    Returns:
        int64 of shape (rows, ``length``) on the CPU: what is to be computed is decided there. A copy from another
        device waits for it, once a micro-batch.
    """
    positions = position_ids.cpu()
    starts = torch.zeros_like(positions)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    documents = starts.cumsum(-1)
    missing = length - positions.shape[1]
    if missing > 0:
        documents = torch.cat([documents, (documents[:, -1:] + 1).expand(-1, missing)], dim=1)
    return documents


def _along_the_sequence(value: torch.Tensor, length: int) -> bool:
    return value.dim() >= 2 and value.shape[1] == length
