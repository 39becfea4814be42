"""How far a student's next tokens are from a teacher's, and from the labels, without the whole logits of either.

Both heads' logits are computed for some rows at a time, and the student's gradients are formed where they are at hand,
as in :mod:`mgpu_pipe.objectives.cross_entropy`. Hinton et al. 2015 (arXiv:1503.02531) for temperatures, Gu et al. 2023
(arXiv:2306.08543) for the reverse divergence, Agarwal et al. 2023 (arXiv:2306.13649) for Jensen and Shannon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.kernels.softmax import add_product_
from mgpu_pipe.objectives.cross_entropy import chunk_rows
from mgpu_pipe.objectives.distill_keys import DistillConfig


@dataclass
class Teaching:
    """What the teacher's head is given of the tokens of a micro-batch, and what was found.

    Attributes:
        hidden: (..., width of the teacher).
        weight, bias: of the teacher's head, (vocabulary, width) and (vocabulary,) or None.
        sums: of the labels' cross-entropies and of the divergences, float64 (2,), after the loss was computed.
    """

    keys: DistillConfig
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sums: torch.Tensor | None = None


def token_divergences(
    student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of every row, (rows,), and its gradient for the student's logits, both times temperature squared.

    Args:
        student, teacher: fp32 logits, (rows, vocabulary).
        kind: ``forward`` is KL(teacher, student), ``reverse`` KL(student, teacher), ``jensen_shannon`` the mean of
            both to their mixture.
    """
    log_student = (student / temperature).log_softmax(-1)
    log_teacher = (teacher / temperature).log_softmax(-1)
    of_student = log_student.exp()
    if kind == "forward":
        of_teacher = log_teacher.exp()
        found = (of_teacher * (log_teacher - log_student)).sum(-1)
        gradient = of_student - of_teacher
    else:
        other = log_teacher
        if kind == "jensen_shannon":
            other = torch.logaddexp(log_student, log_teacher) - math.log(2)
        ratio = log_student - other
        own = (of_student * ratio).sum(-1)
        gradient = of_student * (ratio - own.unsqueeze(-1))
        found = own
        if kind == "jensen_shannon":
            found = (own + (log_teacher.exp() * (log_teacher - other)).sum(-1)) / 2
            gradient = gradient / 2
    return found * temperature**2, gradient * temperature


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rows_at_once: int,
        teaching: Teaching,
    ) -> torch.Tensor:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        keys, share = teaching.keys, teaching.keys.teacher_weight
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        taught = teaching.hidden.reshape(-1, teaching.hidden.shape[-1])
        for start in range(0, hidden.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            chunk, target = hidden[rows], labels[rows]
            valid = (target != IGNORE_INDEX).unsqueeze(1)
            logits = F.linear(chunk, weight, bias).float()
            of_teacher = F.linear(taught[rows], teaching.weight, teaching.bias).float()
            divergences, grad = token_divergences(logits, of_teacher, keys.divergence, keys.temperature)
            losses = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="none")
            sums += torch.stack(
                [part.where(valid[:, 0], 0.0).sum(dtype=torch.float64) for part in (losses, divergences)]
            )
            if grad_hidden is None and grad_weight is None and grad_bias is None:
                continue
            plain = logits.softmax(-1)
            plain.scatter_add_(1, target.clamp_min(0).unsqueeze(1), -valid.float())
            grad = (share * grad + (1 - share) * plain).where(valid, 0.0)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product_(grad_weight, grad.t(), chunk)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        teaching.sums = sums
        return (1 - share) * sums[0] + share * sums[1]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        factor, (weight_dtype, bias_dtype) = grad_output.float(), ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * factor,
            None if grad_weight is None else (grad_weight * factor).to(weight_dtype),
            None if grad_bias is None else (grad_bias * factor).to(bias_dtype),
            None,
            None,
            None,
        )


def linear_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    teaching: Teaching,
) -> torch.Tensor:
    """The loss over the tokens of ``labels``: the mixture of divergence and cross-entropy, summed; a float64 scalar.

    Args:
        hidden: (..., width) of the student, ``weight`` and ``bias`` its head's.
        labels: (...) int64; ``IGNORE_INDEX`` rows count nothing.
        chunk_tokens: rows whose logits, the student's and the teacher's, exist at once.
        teaching: takes the two sums that the loss is made of.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    item = weight.element_size() if weight.is_cuda else None
    rows = chunk_rows(chunk_tokens, 2 * weight.shape[0], flat.shape[0], item)
    result = _LinearDistillation.apply(flat, weight, bias, labels.reshape(-1), rows, teaching)
    assert isinstance(result, torch.Tensor)
    return result
