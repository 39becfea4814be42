"""The softmax of a chunk of logits and its gradient against targets, and a product summed up in fp32.

On GPUs torch.compile makes one kernel of what are seven operators here, which would read and write the logits as often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mgpu_pipe.kernels.compiled import gpu_kernels_compile

FUSED_FROM = 1 << 24
"""Logits in a chunk from which the compiled forms are used; for fewer, compiling takes longer than it saves."""


def fuses(rows: int, weight: torch.Tensor) -> bool:
    """Whether chunks of ``rows`` against the output head's ``weight`` go through the compiled forms."""
    return weight.is_cuda and rows * weight.shape[0] >= FUSED_FROM and gpu_kernels_compile()


def normaliser_and_target(
    logits: torch.Tensor, index: torch.Tensor, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log of the sum of exponentials of each row, and its logit at ``index``; fp32, (rows, 1).

    Args:
        logits: (rows, vocabulary).
        index: int64 (rows, 1).
    """
    return (_compiled(_normaliser_and_target) if fused else _normaliser_and_target)(logits, index)


def gradient_(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    index: torch.Tensor,
    held: torch.Tensor,
    valid: torch.Tensor,
    fused: bool = False,
) -> torch.Tensor:
    """The gradient of the sum of the cross-entropies for ``logits``, in their memory: the softmax less the one-hot.

    Args:
        normaliser: of :func:`normaliser_and_target`, over the whole vocabulary.
        held: bool (rows, 1): the target is among these logits.
        valid: bool (rows, 1): the row counts.
    """
    if fused:
        _compiled(_fused_gradient_)(logits, normaliser, index, held, valid)
        return logits
    grad = logits.sub_(normaliser).exp_()
    grad.scatter_add_(1, index, -held.to(grad.dtype))
    return grad.mul_(valid)


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to ``total`` of fp32, rounded to no shorter type on the way where the device can do so."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += (left @ right).to(total.dtype)


def _normaliser_and_target(logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.logsumexp(logits.float(), dim=1, keepdim=True), logits.gather(1, index).float()


def _fused_gradient_(
    logits: torch.Tensor, normaliser: torch.Tensor, index: torch.Tensor, held: torch.Tensor, valid: torch.Tensor
) -> None:
    softmax = (logits.float() - normaliser).exp()
    at_target = (torch.arange(logits.shape[1], device=logits.device) == index) & held
    logits.copy_(torch.where(valid, softmax - at_target.float(), 0.0))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
