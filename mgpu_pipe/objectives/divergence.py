"""How far a student's next tokens are from a teacher's, and from the labels, without the whole logits of either.

Both heads' logits are computed for some rows at a time, and the student's gradients are formed where they are at hand,
as in :mod:`mgpu_pipe.objectives.cross_entropy`. Hinton et al. 2015 (arXiv:1503.02531) for temperatures, Gu et al. 2023
(arXiv:2306.08543) for the reverse divergence, Agarwal et al. 2023 (arXiv:2306.13649) for Jensen and Shannon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.head_chunks import rows_of, summed


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


class _Mixture:
    """The divergence from the teacher and the labels' cross-entropy, of chunks of the student's logits."""

    def __init__(self, labels: torch.Tensor, teaching: Teaching) -> None:
        self._labels, self._teaching = labels, teaching
        self._taught = teaching.hidden.reshape(-1, teaching.hidden.shape[-1])
        self._sums = torch.zeros(2, dtype=torch.float64, device=labels.device)

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        teaching, target = self._teaching, self._labels[rows]
        keys, share = teaching.keys, teaching.keys.teacher_weight
        valid = (target != IGNORE_INDEX).unsqueeze(1)
        of_teacher = F.linear(self._taught[rows], teaching.weight, teaching.bias).float()
        divergences, grad = token_divergences(logits, of_teacher, keys.divergence, keys.temperature)
        losses = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="none")
        self._sums += torch.stack(
            [part.where(valid[:, 0], 0.0).sum(dtype=torch.float64) for part in (losses, divergences)]
        )
        if not wants_gradient:
            return None
        plain = logits.softmax(-1)
        plain.scatter_add_(1, target.clamp_min(0).unsqueeze(1), -valid.float())
        return (share * grad + (1 - share) * plain).where(valid, 0.0)

    def total(self) -> torch.Tensor:
        self._teaching.sums, share = self._sums, self._teaching.keys.teacher_weight
        return (1 - share) * self._sums[0] + share * self._sums[1]


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
    rows = rows_of(chunk_tokens, weight, len(flat), heads=2)
    return summed(flat, weight, bias, rows, _Mixture(labels.reshape(-1), teaching))
