"""The vocabulary cut over the tensor-parallel ranks: embedding and output head.

Each rank holds a range of the rows of both. A vocabulary that the ranks do not divide is cut unevenly; nothing is
padded. The loss over a cut vocabulary is :mod:`mgpu_pipe.objectives.cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.parallel.sequence import SequenceSplit
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts, sum_backward, sum_forward

SHARD = "vocabulary_shard"
"""The attribute of an output head that says which rows it holds; see :func:`shard_of`."""


def vocabulary_range(rank: int, size: int, vocabulary: int) -> tuple[int, int]:
    """Rows ``start`` to ``stop`` of ``rank``; ranges differ by one row at most."""
    return rank * vocabulary // size, (rank + 1) * vocabulary // size


@dataclass(frozen=True)
class VocabularyShard:
    """Rows ``start`` to ``stop`` of a vocabulary of ``whole``, the rest being with the other ranks of ``group``."""

    group: dist.ProcessGroup
    start: int
    stop: int
    whole: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocabulary: int) -> VocabularyShard:
        """The rows of this rank."""
        return cls(group, *vocabulary_range(group.rank(), group.size(), vocabulary), vocabulary)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For token ids, rows of this shard (any where there is none) and which of them it holds."""
        inside = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).clamp(0, self.stop - self.start - 1), inside

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole logits ``(..., whole)`` from the ranks' ``(..., stop - start)``, for whoever needs them.

        What follows must be the same on every rank: each keeps its range of the gradient.
        """
        return _GatherVocabulary.apply(logits, self)


def shard_of(head: nn.Module) -> VocabularyShard | None:
    """The rows of the vocabulary that ``head`` holds; None where it holds them all."""
    shard = getattr(head, SHARD, None)
    assert shard is None or isinstance(shard, VocabularyShard)
    return shard


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
        ctx.range = shard.start, shard.stop
        size = shard.group.size()
        ranges = [vocabulary_range(rank, size, shard.whole) for rank in range(size)]
        widest = max(stop - start for start, stop in ranges)
        parts = all_gather_parts(F.pad(logits, (0, widest - logits.shape[-1])), shard.group)
        return torch.cat([part[..., : b - a] for part, (a, b) in zip(parts, ranges, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[..., slice(*ctx.range)], None


def vocabulary_parallel_embedding(
    embedding: nn.Embedding, shard: VocabularyShard, sequence: SequenceSplit | None
) -> None:
    """Look up the rows that this rank holds, zeros for the others, and sum over the ranks, in place.

    Under sequence parallelism the sum is left to the first block, which needs a part of it only.
    """
    look_up = embedding.forward  # a family's own may scale what it finds
    padding = embedding.padding_idx
    padding = padding - shard.start if padding is not None and shard.start <= padding < shard.stop else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        rows, inside = shard.locate(ids)
        partial = look_up(rows).masked_fill(~inside.unsqueeze(-1), 0.0)
        return sum_forward(partial, shard.group) if sequence is None else sequence.embed(partial)

    embedding.num_embeddings, embedding.padding_idx = shard.stop - shard.start, padding
    embedding.forward = forward  # type: ignore[method-assign, assignment]


def vocabulary_parallel_head(head: nn.Linear, shard: VocabularyShard, sequence: SequenceSplit | None) -> None:
    """Let ``head`` give whole logits, unless an objective's loss head gives a loss in their place, in place.

    Hooks, not another ``forward``: the objective may have replaced that before, or may do so later.
    """

    def enter(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        # Where the sequence was split, gathering it sums the gradient already.
        return None if sequence is not None and sequence.active else (sum_backward(args[0], shard.group), *args[1:])

    def leave(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return output if output.dim() < 2 else shard.gather(output)  # a loss, or one for each token

    setattr(head, SHARD, shard)
    head.out_features = shard.stop - shard.start
    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)
