"""Cross-entropy of a linear head whose vocabulary is cut over ranks; logits are never gathered.

Each rank computes the logits of its rows, some tokens at a time. What the softmax needs of the other ranks is two
numbers a token: the log of their sums of exponentials, and the target's logit from the one that holds it
(Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3). Gradients are formed in the forward pass as in
:mod:`mgpu_pipe.objectives.cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.window import IGNORE_INDEX
from mgpu_pipe.objectives.cross_entropy import chunk_rows
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts
from mgpu_pipe.parallel.vocabulary import VocabularyShard


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rows_at_once: int,
        shard: VocabularyShard,
    ) -> torch.Tensor:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        several = rows_at_once < hidden.shape[0]
        # Sums over several chunks are kept in fp32; one chunk is one product in the weight's own type.
        sum_dtype = torch.float32 if several else weight.dtype
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            chunk, target = hidden[rows], labels[rows]
            valid = target != IGNORE_INDEX
            index, inside = shard.locate(target)
            logits = F.linear(chunk, weight, bias).float()
            own = torch.stack([
                torch.logsumexp(logits, dim=1),
                logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~inside, 0.0),
            ])  # fmt: skip
            of_all = all_gather_parts(own, shard.group)
            normaliser = torch.logsumexp(of_all[:, 0], dim=0)
            losses = normaliser - of_all[:, 1].sum(0)
            total += torch.where(valid, losses, 0.0).sum(dtype=torch.float64)
            if not (want_hidden or want_weight or want_bias):
                continue
            # d loss / d logits = softmax - one-hot, in the memory of the logits.
            grad = logits.sub_(normaliser.unsqueeze(1)).exp_()
            grad.scatter_add_(1, index.unsqueeze(1), -inside.unsqueeze(1).to(grad.dtype))
            grad.mul_(valid.unsqueeze(1))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += (grad.t() @ chunk).to(sum_dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        factor = grad_output.float()  # multiplied in float32 and rounded once, as the uncut loss does
        return (
            None if grad_hidden is None else grad_hidden * factor,
            None if grad_weight is None else (grad_weight * factor).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * factor).to(ctx.bias_dtype),
            None,
            None,
            None,
        )


def vocabulary_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    shard: VocabularyShard,
    chunk_tokens: int | str = "auto",
) -> torch.Tensor:
    """Sum of the cross-entropies over the whole vocabulary, the same on every rank of ``shard.group``.

    The gradient of ``hidden`` is this rank's part of a sum over the group. A collective call: one all-gather of
    ``2 * rows`` floats a rank for every chunk of rows.

    Args:
        hidden: ``(..., width)``, the same on every rank.
        weight: ``(shard.stop - shard.start, width)``, bias of that length or None.
        labels: ``(...)`` int64 in the whole vocabulary; ``IGNORE_INDEX`` rows count nothing.
        chunk_tokens: rows of logits at once; see :func:`chunk_rows`.

    Returns:
        A float64 scalar.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    # By the widest shard: ranks have to agree on the number of chunks.
    widest = -(-shard.whole // shard.group.size())
    rows = chunk_rows(chunk_tokens, widest, flat.shape[0])
    result = _VocabularyCrossEntropy.apply(flat, weight, bias, labels.reshape(-1), rows, shard)
    assert isinstance(result, torch.Tensor)
    return result
