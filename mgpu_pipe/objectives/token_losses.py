"""The cross-entropy of every token by itself, of a linear head, without the whole logits.

For losses that weigh each token only when those of the whole sample are known, as preferences do: the backward pass is
told the weights, and computes a chunk's logits once more. Of tokens that count alone, on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.cross_entropy import Labels
from mgpu_pipe.objectives.head_chunks import over_chunks, rows_of
from mgpu_pipe.parallel.vocabulary import VocabularyShard


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
        losses, of_labels = torch.empty(len(labels), device=hidden.device), Labels(labels, shard)
        normalisers = torch.empty_like(losses)

        def measure(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> None:
            found = of_labels.losses(rows, logits)
            losses[rows], normalisers[rows] = (value.squeeze(1) for value in found)

        over_chunks(hidden, weight, bias, rows_at_once, measure)
        ctx.save_for_backward(hidden, weight, bias, labels, normalisers)
        ctx.rows_at_once, ctx.shard = rows_at_once, shard
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, normalisers = ctx.saved_tensors
        of_labels = Labels(labels, ctx.shard)

        def weigh(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
            grad = of_labels.gradient_(rows, logits, normalisers[rows].unsqueeze(1))
            return grad.mul_(grad_output[rows].unsqueeze(1))

        gradients = over_chunks(hidden, weight, bias, ctx.rows_at_once, weigh, ctx.needs_input_grad[:3])
        given = zip(gradients, (hidden, weight, bias), strict=True)
        return *(None if grad is None else grad.to(value.dtype) for grad, value in given), None, None, None


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """The cross-entropy of every label, fp32 of shape (labels,); 0 where it is ``IGNORE_INDEX``.

    Arguments, and what is collective, are as in :func:`mgpu_pipe.objectives.cross_entropy.linear_cross_entropy`.
    """
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if flat.is_cuda:  # it would wait for the number of those that count
        return _losses(flat, weight, bias, wanted, chunk_tokens, shard)
    counts = (wanted != IGNORE_INDEX).nonzero().squeeze(1)
    counts = counts if len(counts) else torch.zeros(1, dtype=torch.int64, device=counts.device)
    found = _losses(flat.index_select(0, counts), weight, bias, wanted[counts], chunk_tokens, shard)
    return found.new_zeros(len(wanted)).index_copy(0, counts, found)


def _losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    shard: VocabularyShard | None,
) -> torch.Tensor:
    rows = rows_of(chunk_tokens, weight, len(hidden), shard)
    result = _TokenLosses.apply(hidden, weight, bias, labels, rows, shard)
    assert isinstance(result, torch.Tensor)
    return result
