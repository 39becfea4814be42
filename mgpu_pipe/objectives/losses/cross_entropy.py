"""Cross-entropy of a linear head over a large vocabulary without the whole logits.

With a sharded vocabulary each rank computes the logits of its rows, which are never gathered. The softmax needs two
numbers per token of the other ranks: the log of their sums of exponentials, and the target's logit from the rank that
holds it (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.losses.chunked_head import (
    ChunkedHead,
    apply_to_chunks,
    fuses,
    gradient_,
    normaliser_and_target,
)
from mgpu_pipe.parallel.tensor.collectives import all_gather_parts
from mgpu_pipe.parallel.tensor.heads import VocabularyShard


class Labels:
    """Cross-entropies of labels, ``(tokens,)`` int64, from chunks of their logits.

    Args:
        shard: rows of the vocabulary that the logits cover; None for all.
        fused: whether to use the compiled kernels, which take logits of any type.
    """

    def __init__(self, labels: torch.Tensor, shard: VocabularyShard | None, fused: bool = False) -> None:
        self._labels, self._shard, self._fused = labels, shard, fused

    def losses(self, rows: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of ``rows``, 0 where a label is ``IGNORE_INDEX``, and the softmax's normalisers; each (rows, 1)."""
        index, in_shard, valid = self._locate(rows)
        normaliser, target_logit = normaliser_and_target(logits, index, self._fused)
        if self._shard is not None:
            normaliser, target_logit = combine_shards(normaliser, target_logit.masked_fill(~in_shard, 0.0), self._shard)
        return torch.where(valid, normaliser - target_logit, 0.0), normaliser

    def gradient_(self, rows: slice, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """Gradient of the summed losses by ``logits``, in their memory."""
        return gradient_(logits, normaliser, *self._locate(rows), self._fused)

    def _locate(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Columns of the labels in the logits, masks of those in this shard and of the valid ones; each (rows, 1)."""
        labels = self._labels[rows].unsqueeze(1)
        valid = labels != IGNORE_INDEX
        index, in_shard = (labels.clamp_min(0), valid) if self._shard is None else self._shard.locate(labels)
        return index, in_shard, valid


class _CrossEntropy:
    def __init__(self, labels: torch.Tensor, shard: VocabularyShard | None, fused: bool) -> None:
        self._labels = Labels(labels, shard, fused)
        self._sum = torch.zeros((), dtype=torch.float64, device=labels.device)

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        losses, normaliser = self._labels.losses(rows, logits)
        self._sum += losses.sum(dtype=torch.float64)
        return self._labels.gradient_(rows, logits, normaliser) if wants_gradient else None

    def total(self) -> torch.Tensor:
        return self._sum


def combine_shards(
    normaliser: torch.Tensor, target_logit: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax's normaliser and the target's logit over the whole vocabulary, from those of all shards."""
    all_shards = all_gather_parts(torch.stack([normaliser, target_logit]), shard.group)
    return torch.logsumexp(all_shards[:, 0], dim=0), all_shards[:, 1].sum(0)


def linear_cross_entropy(head: ChunkedHead) -> torch.Tensor:
    """Sum of the cross-entropies of ``hidden @ weight.T + bias`` against the labels, a float64 scalar.

    With a ``shard`` this is a collective call of its group: one all-gather of ``2 * rows`` floats per rank and chunk.
    The loss is equal on every rank. The gradient of ``hidden`` is this rank's part of a sum over ranks.
    """
    fused = head.bias is None and fuses(head.rows_at_once(), head.weight)
    return head.sum_loss(_CrossEntropy(head.targets, head.shard, fused), keep_dtype=fused)


def logits_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each label from whole ``logits`` ``(..., vocabulary)``; fp32, (labels,)."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )


def logits_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of :func:`logits_token_losses`, a float64 scalar."""
    return logits_token_losses(logits, labels).sum(dtype=torch.float64)


@torch.no_grad()
def correct_predictions(head: ChunkedHead) -> torch.Tensor:
    """Mask of labels with the largest logit, in their shape. Collective with a ``shard``."""
    wanted, shard = head.targets, head.shard
    right = torch.zeros_like(wanted, dtype=torch.bool)

    def compare(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> None:
        value, token = logits.max(1)
        if shard is not None:
            all_shards = all_gather_parts(torch.stack([value.double(), (token + shard.start).double()]), shard.group)
            token = all_shards[:, 1].gather(0, all_shards[:, 0].argmax(0, keepdim=True))[0].long()
        right[rows] = (token == wanted[rows]) & (wanted[rows] != IGNORE_INDEX)

    head.visit(compare)
    return right.view(head.labels.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rows_at_once: int,
        shard: VocabularyShard | None,
    ) -> torch.Tensor:
        losses, label_losses = torch.empty(len(labels), device=hidden.device), Labels(labels, shard)
        normalisers = torch.empty_like(losses)

        def measure(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> None:
            measured = label_losses.losses(rows, logits)
            losses[rows], normalisers[rows] = (value.squeeze(1) for value in measured)

        apply_to_chunks(hidden, weight, bias, rows_at_once, measure)
        ctx.save_for_backward(hidden, weight, bias, labels, normalisers)
        ctx.rows_at_once, ctx.shard = rows_at_once, shard
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, normalisers = ctx.saved_tensors
        label_losses = Labels(labels, ctx.shard)

        def weigh(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
            grad = label_losses.gradient_(rows, logits, normalisers[rows].unsqueeze(1))
            return grad.mul_(grad_output[rows].unsqueeze(1))

        gradients = apply_to_chunks(hidden, weight, bias, ctx.rows_at_once, weigh, ctx.needs_input_grad[:3])
        pairs = zip(gradients, (hidden, weight, bias), strict=True)
        return *(None if grad is None else grad.to(value.dtype) for grad, value in pairs), None, None, None


def linear_token_losses(head: ChunkedHead) -> torch.Tensor:
    """Cross-entropy of each label, fp32, (labels,); 0 where it is ``IGNORE_INDEX``. Collective with a ``shard``."""
    flat, wanted = head.rows, head.targets
    if flat.is_cuda:  # the number of valid labels would need a host sync
        return _losses(head, flat, wanted)
    counts = (wanted != IGNORE_INDEX).nonzero().squeeze(1)
    counts = counts if len(counts) else torch.zeros(1, dtype=torch.int64, device=counts.device)
    losses = _losses(head, flat.index_select(0, counts), wanted[counts])
    return losses.new_zeros(len(wanted)).index_copy(0, counts, losses)


def _losses(head: ChunkedHead, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    at_once = head.rows_at_once(rows=len(rows))
    result = _TokenLosses.apply(rows, head.weight, head.bias, labels, at_once, head.shard)
    assert isinstance(result, torch.Tensor)
    return result
