"""The cross-entropy of every token by itself, of a linear head, without the whole logits.

For losses that weigh each token only when those of the whole sample are known, as preferences do: the backward pass is
told the weights, and computes a chunk's logits once more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.kernels.softmax import add_product_, gradient_, normaliser_and_target
from mgpu_pipe.objectives.cross_entropy import chunk_rows, over_shards
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
        losses = torch.empty(len(labels), device=hidden.device)
        normalisers = torch.empty_like(losses)
        for start in range(0, len(labels), rows_at_once):
            rows = slice(start, start + rows_at_once)
            index, held, valid = _located(labels[rows], shard)
            normaliser, of_target = normaliser_and_target(F.linear(hidden[rows], weight, bias).float(), index)
            if shard is not None:
                normaliser, of_target = over_shards(normaliser, of_target.masked_fill(~held, 0.0), shard)
            losses[rows] = (normaliser - of_target).masked_fill(~valid, 0.0).squeeze(1)
            normalisers[rows] = normaliser.squeeze(1)
        ctx.save_for_backward(hidden, weight, bias, labels, normalisers)
        ctx.rows_at_once, ctx.shard = rows_at_once, shard
        return losses

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, normalisers = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
        for start in range(0, len(labels), ctx.rows_at_once):
            rows = slice(start, start + ctx.rows_at_once)
            chunk, (index, held, valid) = hidden[rows], _located(labels[rows], ctx.shard)
            logits = F.linear(chunk, weight, bias).float()
            grad = gradient_(logits, normalisers[rows].unsqueeze(1), index, held, valid)
            grad.mul_(grad_output[rows].unsqueeze(1))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product_(grad_weight, grad.t(), chunk)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _located(labels: torch.Tensor, shard: VocabularyShard | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of labels, each (rows, 1): their rows of the head, which of them it holds, and which count."""
    valid = labels != IGNORE_INDEX
    index, held = (labels.clamp_min(0), valid) if shard is None else shard.locate(labels)
    return index.unsqueeze(1), held.unsqueeze(1), valid.unsqueeze(1)


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
    flat = hidden.reshape(-1, hidden.shape[-1])
    vocabulary = weight.shape[0] if shard is None else -(-shard.whole // shard.group.size())
    rows = chunk_rows(chunk_tokens, vocabulary, flat.shape[0], weight.element_size() if weight.is_cuda else None)
    result = _TokenLosses.apply(flat, weight, bias, labels.reshape(-1), rows, shard)
    assert isinstance(result, torch.Tensor)
    return result
