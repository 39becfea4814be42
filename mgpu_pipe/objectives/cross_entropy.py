"""Cross-entropy of a linear head over a large vocabulary without the whole logits.

The head's matrix product, the softmax and their gradients are computed for some rows at a time, so the logits of
``(tokens, vocabulary)`` never exist whole. Gradients are formed in the forward pass, where the chunk's logits are
at hand, so nothing is recomputed: the cost is that of the plain computation (Hsu et al. 2024, "Liger Kernel",
arXiv:2410.10989, section 3.2).

Where the head's vocabulary is cut over ranks, each computes the logits of its rows of it, and they are never gathered.
What the softmax needs of the other ranks is two numbers a token: the log of their sums of exponentials, and the
target's logit from the one that holds it (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.kernels.softmax import add_product_, fuses, gradient_, normaliser_and_target
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts
from mgpu_pipe.parallel.vocabulary import VocabularyShard

AUTO_CHUNK_BYTES = 64 << 20
AUTO_CHUNK_BYTES_GPU = 256 << 20
"""Their matrix products are at full speed from about a thousand rows on."""
GPU_TILE = 128
"""Rows of a GPU's matrix products go in multiples of it."""


def chunk_rows(setting: int | str, vocabulary: int, rows: int, gpu_item: int | None = None) -> int:
    """Rows of logits that exist at once; 0 takes all rows, and ``auto`` what fits in 64 MiB of float32 logits.

    Args:
        gpu_item: on a GPU the bytes of a logit; there ``auto`` is what fits in 256 MiB.
    """
    if setting != "auto":
        return min(int(setting), rows) if setting else rows
    if gpu_item is None:
        return max(1, min(rows, AUTO_CHUNK_BYTES // (4 * vocabulary)))
    fitting = AUTO_CHUNK_BYTES_GPU // (gpu_item * vocabulary)
    return max(1, min(rows, fitting - fitting % GPU_TILE if fitting > GPU_TILE else fitting))


class _LinearCrossEntropy(torch.autograd.Function):
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
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        want_any = want_hidden or want_weight or want_bias
        fused = bias is None and fuses(rows_at_once, weight)
        several = rows_at_once < hidden.shape[0]
        # Sums over several chunks are kept in fp32; one chunk is one product in the weight's own type.
        sum_dtype = torch.float32 if several else weight.dtype
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if want_weight and several else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            chunk, target = hidden[rows], labels[rows]
            valid = target != IGNORE_INDEX
            index, held = (target.clamp_min(0), valid) if shard is None else shard.locate(target)
            index, held = index.unsqueeze(1), held.unsqueeze(1)
            logits = F.linear(chunk, weight, bias)
            logits = logits if fused else logits.float()
            normaliser, of_target = normaliser_and_target(logits, index, fused)
            if shard is not None:
                normaliser, of_target = over_shards(normaliser, of_target.masked_fill(~held, 0.0), shard)
            losses = normaliser - of_target
            total += torch.where(valid.unsqueeze(1), losses, 0.0).sum(dtype=torch.float64)
            if not want_any:
                continue
            grad = gradient_(logits, normaliser, index, held, valid.unsqueeze(1), fused)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if want_weight:
                if grad_weight is None:
                    grad_weight = grad.t() @ chunk
                else:
                    add_product_(grad_weight, grad.t(), chunk)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Not rounded to bf16, which would put every gradient off by one factor of up to 0.2%: torch multiplies a bf16
        # tensor by a 0-dim float32 one in float32 and rounds once.
        factor = grad_output.float()
        return (
            None if grad_hidden is None else grad_hidden * factor,
            None if grad_weight is None else (grad_weight * factor).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * factor).to(ctx.bias_dtype),
            None,
            None,
            None,
        )


def over_shards(
    normaliser: torch.Tensor, of_target: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax's normaliser and the target's logit over the whole vocabulary, from those of the ranks' rows."""
    of_all = all_gather_parts(torch.stack([normaliser, of_target]), shard.group)
    return torch.logsumexp(of_all[:, 0], dim=0), of_all[:, 1].sum(0)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of ``hidden @ weight.T + bias`` against ``labels``.

    With a ``shard`` this is a collective call of its group, one all-gather of ``2 * rows`` floats a rank for every
    chunk; the loss is the same on every rank, and the gradient of ``hidden`` is this rank's part of a sum over them.

    Args:
        hidden: ``(..., width)``.
        weight: ``(vocabulary, width)``, or this rank's rows of it; bias of that length, or None.
        labels: ``(...)`` int64 in the whole vocabulary; ``IGNORE_INDEX`` rows count nothing.
        chunk_tokens: rows of logits at once; see :func:`chunk_rows`.
        shard: which rows of the vocabulary ``weight`` holds; None for all.

    Returns:
        A float64 scalar.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    # By the widest shard: ranks have to agree on the number of chunks.
    vocabulary = weight.shape[0] if shard is None else -(-shard.whole // shard.group.size())
    rows = chunk_rows(chunk_tokens, vocabulary, flat.shape[0], weight.element_size() if weight.is_cuda else None)
    result = _LinearCrossEntropy.apply(flat, weight, bias, labels.reshape(-1), rows, shard)
    assert isinstance(result, torch.Tensor)
    return result


def logits_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of every label from whole ``logits`` ``(..., vocabulary)``; fp32 of shape (labels,)."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )


def logits_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Their sum, a float64 scalar."""
    return logits_token_losses(logits, labels).sum(dtype=torch.float64)


@torch.no_grad()
def correct_predictions(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Which labels have the largest logit, of their shape; arguments, and what is collective, as in
    :func:`linear_cross_entropy`."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    vocabulary = weight.shape[0] if shard is None else -(-shard.whole // shard.group.size())
    rows = chunk_rows(chunk_tokens, vocabulary, flat.shape[0], weight.element_size() if weight.is_cuda else None)
    right = torch.zeros_like(wanted, dtype=torch.bool)
    for start in range(0, flat.shape[0], rows):
        target = wanted[start : start + rows]
        value, token = F.linear(flat[start : start + rows], weight, bias).float().max(1)
        if shard is not None:
            of_all = all_gather_parts(torch.stack([value.double(), (token + shard.start).double()]), shard.group)
            token = of_all[:, 1].gather(0, of_all[:, 0].argmax(0, keepdim=True))[0].long()
        right[start : start + rows] = (token == target) & (target != IGNORE_INDEX)
    return right.view(labels.shape)
