"""An output head over some tokens at a time, so that the logits of ``(tokens, vocabulary)`` never exist whole.

One loop for every loss of a head: it is given a function for a chunk's logits. A loss that is a sum forms its gradients
in the forward pass, where the chunk's logits are at hand, so nothing is recomputed: the cost is that of the plain
computation (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from mgpu_pipe.kernels.softmax import add_product_
from mgpu_pipe.parallel.vocabulary import VocabularyShard

AUTO_CHUNK_BYTES = 64 << 20
AUTO_CHUNK_BYTES_GPU = 256 << 20
"""Their matrix products are at full speed from about a thousand rows on."""
GPU_TILE = 128
"""Rows of a GPU's matrix products go in multiples of it."""

Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class OfChunk(Protocol):
    """What is done with a chunk's logits."""

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        """The gradient for ``logits``, (rows, vocabulary), where it is wanted; it may lie in their memory."""


class SummedLoss(OfChunk, Protocol):
    """The same, and the sum of the chunks' losses, float64."""

    def total(self) -> torch.Tensor: ...


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


def rows_of(
    setting: int | str, weight: torch.Tensor, rows: int, shard: VocabularyShard | None = None, heads: int = 1
) -> int:
    """:func:`chunk_rows` of a head's ``weight``, where tensors of ``heads`` times the logits' size exist together."""
    # By the widest shard: ranks have to agree on the number of chunks.
    vocabulary = weight.shape[0] if shard is None else -(-shard.whole // shard.group.size())
    return chunk_rows(setting, heads * vocabulary, rows, weight.element_size() if weight.is_cuda else None)


def over_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows_at_once: int,
    of_chunk: OfChunk,
    wanted: Sequence[bool] = (False, False, False),
    as_they_are: bool = False,
) -> Gradients:
    """Give ``of_chunk`` the logits of ``hidden``, (tokens, width), some rows at a time.

    Args:
        wanted: which of ``hidden``, ``weight`` and ``bias`` want a gradient.
        as_they_are: logits in the head's type, else in fp32.

    Returns:
        Those gradients; that of ``weight`` in fp32 where there are several chunks, that of ``bias`` always.
    """
    want_hidden, want_weight, want_bias = wanted
    several = rows_at_once < hidden.shape[0]
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    # Sums over several chunks are kept in fp32; one chunk is one product in the weight's own type.
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight and several else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
    for start in range(0, hidden.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        chunk = hidden[rows]
        logits = F.linear(chunk, weight, bias)
        logits = logits if as_they_are else logits.float()
        grad = of_chunk(rows, logits, any(wanted))
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


def summed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows_at_once: int,
    loss: SummedLoss,
    as_they_are: bool = False,
) -> torch.Tensor:
    """The sum of ``loss`` over all tokens of ``hidden``; a float64 scalar. Arguments as of :func:`over_chunks`."""
    result = _Summed.apply(hidden, weight, bias, rows_at_once, loss, as_they_are)
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
        as_they_are: bool,
    ) -> torch.Tensor:
        gradients = over_chunks(hidden, weight, bias, rows_at_once, loss, ctx.needs_input_grad[:3], as_they_are)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss.total()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Not rounded to bf16, which would put every gradient off by one factor of up to 0.2%: torch multiplies a bf16
        # tensor by a 0-dim float32 one in float32 and rounds once. Not in place: a schedule that splits the backward
        # pass comes here twice.
        factor = grad_output.float()
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if grad is None else (grad * factor).to(dtype) for grad, dtype in gradients), None, None, None
