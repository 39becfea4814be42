"""Cross-entropy of a linear head over a large vocabulary without the whole logits.

With a sharded vocabulary each rank computes the logits of its rows, which are never gathered. The softmax needs two
numbers per token of the other ranks: the log of their sums of exponentials, and the target's logit from the rank that
holds it (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.formulas.kept_memory import chunk_rows
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.kernels.softmax import add_product_, fuses, gradient_, normaliser_and_target
from mgpu_pipe.parallel.tensor.collectives import all_gather_parts
from mgpu_pipe.parallel.tensor.heads import VocabularyShard

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class ChunkFunction(Protocol):
    """Function of a chunk's logits."""

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        """Gradient of ``logits``, (rows, vocabulary), if wanted; may reuse their memory."""


class SummedLoss(ChunkFunction, Protocol):
    """Chunk function that adds up the chunks' losses."""

    def total(self) -> torch.Tensor:
        """Sum of the losses, a float64 scalar."""


def rows_per_chunk(
    setting: int | str, weight: torch.Tensor, rows: int, shard: VocabularyShard | None = None, heads: int = 1
) -> int:
    """:func:`chunk_rows` of a head's ``weight`` if tensors of ``heads`` times the logits' size exist together."""
    # From the widest shard, because ranks must agree on the number of chunks.
    vocabulary = weight.shape[0] if shard is None else -(-shard.whole // shard.group.size())
    return chunk_rows(setting, heads * vocabulary, rows, weight.element_size() if weight.is_cuda else None)


def apply_to_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows_at_once: int,
    chunk_function: ChunkFunction,
    wanted: Sequence[bool] = (False, False, False),
    keep_dtype: bool = False,
) -> Gradients:
    """Calls ``chunk_function`` with the logits of ``hidden``, (tokens, width), some rows at a time.

    Args:
        wanted: which of ``hidden``, ``weight`` and ``bias`` need a gradient.
        keep_dtype: whether logits stay in the head's type instead of fp32.

    Returns:
        These gradients. That of ``weight`` is fp32 with several chunks, that of ``bias`` always.
    """
    want_hidden, want_weight, want_bias = wanted
    several = rows_at_once < hidden.shape[0]
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    # Sums over several chunks are fp32; a single chunk is one product in the weight's type.
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight and several else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
    for start in range(0, hidden.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        chunk = hidden[rows]
        logits = F.linear(chunk, weight, bias)
        logits = logits if keep_dtype else logits.float()
        grad = chunk_function(rows, logits, any(wanted))
        if grad is None:
            continue
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        grad = grad.to(weight.dtype)
        if grad_hidden is not None:
            torch.mm(grad, weight, out=grad_hidden[rows])
        if grad_weight is not None:
            add_product_(grad_weight, grad.t(), chunk)
        elif want_weight:
            grad_weight = grad.t() @ chunk
    return grad_hidden, grad_weight, grad_bias


def sum_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows_at_once: int,
    loss: SummedLoss,
    keep_dtype: bool = False,
) -> torch.Tensor:
    """Sum of ``loss`` over all tokens of ``hidden``, a float64 scalar. Arguments as in :func:`apply_to_chunks`."""
    result = _Summed.apply(hidden, weight, bias, rows_at_once, loss, keep_dtype)
    assert isinstance(result, torch.Tensor)
    return result


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows_at_once: int,
        loss: SummedLoss,
        keep_dtype: bool,
    ) -> torch.Tensor:
        gradients = apply_to_chunks(hidden, weight, bias, rows_at_once, loss, ctx.needs_input_grad[:3], keep_dtype)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss.total()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A bf16 factor would put every gradient off by up to 0.2%. torch multiplies a bf16 tensor by a 0-dim float32
        # one in float32 and rounds once. Not in place: a schedule that splits the backward pass calls this twice.
        factor = grad_output.float()
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if grad is None else (grad * factor).to(dtype) for grad, dtype in gradients), None, None, None


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


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of ``hidden @ weight.T + bias`` against ``labels``.

    With a ``shard`` this is a collective call of its group: one all-gather of ``2 * rows`` floats per rank and chunk.
    The loss is equal on every rank. The gradient of ``hidden`` is this rank's part of a sum over ranks.

    Args:
        hidden: ``(..., width)``.
        weight: ``(vocabulary, width)``, or this rank's rows of it; bias of that length, or None.
        labels: ``(...)`` int64 in the whole vocabulary; ``IGNORE_INDEX`` rows do not count.
        chunk_tokens: rows of logits at once; see :func:`mgpu_pipe.architectures.formulas.kept_memory.chunk_rows`.
        shard: rows of the vocabulary in ``weight``; None for all.

    Returns:
        A float64 scalar.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = rows_per_chunk(chunk_tokens, weight, len(flat), shard)
    fused = bias is None and fuses(rows, weight)
    return sum_loss(flat, weight, bias, rows, _CrossEntropy(labels.reshape(-1), shard, fused), keep_dtype=fused)


def logits_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each label from whole ``logits`` ``(..., vocabulary)``; fp32, (labels,)."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )


def logits_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of :func:`logits_token_losses`, a float64 scalar."""
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
    """Mask of labels with the largest logit, in their shape. Arguments and collectives as in
    :func:`linear_cross_entropy`."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    right = torch.zeros_like(wanted, dtype=torch.bool)

    def compare(rows: slice, logits: torch.Tensor, wants_gradient: bool) -> None:
        value, token = logits.max(1)
        if shard is not None:
            all_shards = all_gather_parts(torch.stack([value.double(), (token + shard.start).double()]), shard.group)
            token = all_shards[:, 1].gather(0, all_shards[:, 0].argmax(0, keepdim=True))[0].long()
        right[rows] = (token == wanted[rows]) & (wanted[rows] != IGNORE_INDEX)

    apply_to_chunks(flat, weight, bias, rows_per_chunk(chunk_tokens, weight, len(flat), shard), compare)
    return right.view(labels.shape)


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


def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str = "auto",
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Cross-entropy of each label, fp32, (labels,); 0 where it is ``IGNORE_INDEX``.

    Arguments and collectives as in :func:`mgpu_pipe.objectives.losses.cross_entropy.linear_cross_entropy`.
    """
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if flat.is_cuda:  # the number of valid labels would need a host sync
        return _losses(flat, weight, bias, wanted, chunk_tokens, shard)
    counts = (wanted != IGNORE_INDEX).nonzero().squeeze(1)
    counts = counts if len(counts) else torch.zeros(1, dtype=torch.int64, device=counts.device)
    losses = _losses(flat.index_select(0, counts), weight, bias, wanted[counts], chunk_tokens, shard)
    return losses.new_zeros(len(wanted)).index_copy(0, counts, losses)


def _losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    shard: VocabularyShard | None,
) -> torch.Tensor:
    rows = rows_per_chunk(chunk_tokens, weight, len(hidden), shard)
    result = _TokenLosses.apply(hidden, weight, bias, labels, rows, shard)
    assert isinstance(result, torch.Tensor)
    return result
