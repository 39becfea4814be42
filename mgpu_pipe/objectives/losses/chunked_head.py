"""A linear head over a large vocabulary, whose logits exist for some rows at a time.

Losses are functions of a :class:`ChunkedHead`: cross-entropies, right predictions and the divergence from a teacher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.formulas.kept_memory import chunk_rows
from mgpu_pipe.models.kernels.layers import gpu_kernels_compile
from mgpu_pipe.parallel.tensor.heads import VocabularyShard
from mgpu_pipe.system.compat.torch_private import compile_function

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class ChunkFunction(Protocol):
    """Function of a chunk's logits."""

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        """Gradient of ``logits``, (rows, vocabulary), if wanted; may reuse their memory."""


class SummedLoss(ChunkFunction, Protocol):
    """Chunk function that adds up the chunks' losses."""

    def total(self) -> torch.Tensor:
        """Sum of the losses, a float64 scalar."""


@dataclass(frozen=True)
class ChunkedHead:
    """A linear head with the hidden states that it reads and their labels.

    With a ``shard`` each method is a collective call of its group.

    Attributes:
        hidden: ``(..., width)``.
        weight: ``(vocabulary, width)``, or this rank's rows of it; bias of that length, or None.
        labels: ``(...)`` int64 in the whole vocabulary; ``IGNORE_INDEX`` rows do not count.
        chunk_tokens: rows of logits at once; see :func:`~mgpu_pipe.architectures.formulas.kept_memory.chunk_rows`.
        shard: rows of the vocabulary in ``weight``; None for all.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    chunk_tokens: int | str = "auto"
    shard: VocabularyShard | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Hidden states of all tokens, (tokens, width)."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    @property
    def targets(self) -> torch.Tensor:
        """Labels of all tokens, (tokens,)."""
        return self.labels.reshape(-1)

    def rows_at_once(self, heads: int = 1, rows: int | None = None) -> int:
        """:func:`chunk_rows` of ``rows`` (all tokens by default) if ``heads`` tensors of the logits' size exist
        together."""
        # From the widest shard, because ranks must agree on the number of chunks.
        vocabulary = self.weight.shape[0] if self.shard is None else -(-self.shard.whole // self.shard.group.size())
        item = self.weight.element_size() if self.weight.is_cuda else None
        rows = self.hidden.numel() // self.hidden.shape[-1] if rows is None else rows
        return chunk_rows(self.chunk_tokens, heads * vocabulary, rows, item)

    def visit(self, chunk_function: ChunkFunction) -> None:
        """Call ``chunk_function`` with all fp32 logits, without gradients."""
        apply_to_chunks(self.rows, self.weight, self.bias, self.rows_at_once(), chunk_function)

    def sum_loss(self, loss: SummedLoss, heads: int = 1, keep_dtype: bool = False) -> torch.Tensor:
        """Sum of ``loss`` over all tokens, a float64 scalar, with gradients that the forward pass computes.

        Args:
            heads: as in :meth:`rows_at_once`.
            keep_dtype: whether logits stay in the head's type instead of fp32.
        """
        result = _Summed.apply(self.rows, self.weight, self.bias, self.rows_at_once(heads), loss, keep_dtype)
        assert isinstance(result, torch.Tensor)
        return result


def apply_to_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows_at_once: int,
    chunk_function: ChunkFunction,
    wanted: tuple[bool, ...] = (False, False, False),
    keep_dtype: bool = False,
) -> Gradients:
    """Call ``chunk_function`` with the logits of ``hidden``, (tokens, width), some rows at a time.

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


FUSED_FROM = 1 << 24
"""Fewest logits in a chunk for the compiled forms; below, compiling costs more than it saves."""


def fuses(rows: int, weight: torch.Tensor) -> bool:
    """Whether chunks of ``rows`` against the output head's ``weight`` use the compiled forms."""
    return weight.is_cuda and rows * weight.shape[0] >= FUSED_FROM and gpu_kernels_compile()


def normaliser_and_target(
    logits: torch.Tensor, index: torch.Tensor, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of each row of ``logits``, (rows, vocabulary), and its logit at ``index``; fp32, (rows, 1)."""
    return (_compile(_normaliser_and_target) if fused else _normaliser_and_target)(logits, index)


def gradient_(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    index: torch.Tensor,
    in_shard: torch.Tensor,
    valid: torch.Tensor,
    fused: bool = False,
) -> torch.Tensor:
    """Gradient of the summed cross-entropies by ``logits``, in their memory: softmax minus one-hot.

    Args:
        normaliser: result of :func:`normaliser_and_target` over the whole vocabulary.
        in_shard: bool (rows, 1): whether the target is among these logits.
        valid: bool (rows, 1): whether the row counts.
    """
    if fused:
        _compile(_fused_gradient_)(logits, normaliser, index, in_shard, valid)
        return logits
    grad = logits.sub_(normaliser).exp_()
    grad.scatter_add_(1, index, -in_shard.to(grad.dtype))
    return grad.mul_(valid)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds ``left @ right`` to ``total`` of fp32, without rounding to a shorter type if the device can."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += (left @ right).to(total.dtype)


def _normaliser_and_target(logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.logsumexp(logits.float(), dim=1, keepdim=True), logits.gather(1, index).float()


def _fused_gradient_(
    logits: torch.Tensor, normaliser: torch.Tensor, index: torch.Tensor, in_shard: torch.Tensor, valid: torch.Tensor
) -> None:
    softmax = (logits.float() - normaliser).exp()
    at_target = (torch.arange(logits.shape[1], device=logits.device) == index) & in_shard
    logits.copy_(torch.where(valid, softmax - at_target.float(), 0.0))


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return compile_function(function)
