"""Softmax of a chunk of logits, its gradient against targets, and a product accumulated in fp32.

On GPUs torch.compile fuses seven operators into one kernel, which else would read and write the logits seven times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mgpu_pipe.models.kernels.layers import gpu_kernels_compile
from mgpu_pipe.system.compat.torch_private import compiled

FUSED_FROM = 1 << 24
"""Fewest logits in a chunk for the compiled forms; below, compiling costs more than it saves."""


def fuses(rows: int, weight: torch.Tensor) -> bool:
    """Whether chunks of ``rows`` against the output head's ``weight`` use the compiled forms."""
    return weight.is_cuda and rows * weight.shape[0] >= FUSED_FROM and gpu_kernels_compile()


def normaliser_and_target(
    logits: torch.Tensor, index: torch.Tensor, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the sum of exponentials of each row, and its logit at ``index``; fp32, (rows, 1).

    Args:
        logits: (rows, vocabulary).
        index: int64 (rows, 1).
    """
    return (_compiled(_normaliser_and_target) if fused else _normaliser_and_target)(logits, index)


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
        _compiled(_fused_gradient_)(logits, normaliser, index, in_shard, valid)
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
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function)
