"""Divergence of a student's next tokens from a teacher's, and from the labels, without whole logits of either.

Both heads compute logits for some rows at a time, and the student's gradients at once, as in
:mod:`mgpu_pipe.objectives.losses.cross_entropy`. Hinton et al. 2015 (arXiv:1503.02531) for temperatures, Gu et
al. 2023 (arXiv:2306.08543) for the reverse divergence, Agarwal et al. 2023 (arXiv:2306.13649) for Jensen and Shannon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.cross_entropy import Labels
from mgpu_pipe.parallel.tensor.collectives import all_gather_parts
from mgpu_pipe.parallel.tensor.heads import VocabularyShard


@dataclass
class Teaching:
    """Inputs of the teacher's head for a micro-batch, and the resulting sums.

    Attributes:
        hidden: the teacher's hidden states, (..., width of the teacher).
        weight, bias: the teacher's head, (vocabulary, width) and (vocabulary,) or None.
        sums: sums of the labels' cross-entropies and of the divergences, float64 (2,); None before the loss.
    """

    keys: DistillConfig
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sums: torch.Tensor | None = None


def token_divergences(
    student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float, shard: VocabularyShard | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence of each row, (rows,), and its gradient by the student's logits, both times temperature squared.

    With a ``shard`` this is a collective call of its group: two or three numbers per row.

    Args:
        student, teacher: fp32 logits, (rows, vocabulary).
        kind: ``forward`` is KL(teacher, student), ``reverse`` KL(student, teacher), ``jensen_shannon`` the mean of
            both to their mixture.
        shard: columns of the vocabulary in the logits; None for all.
    """
    # One after the other, then in place, because chunks are large. Four are alive if the caller drops the teacher's.
    if shard is None:
        teacher = (teacher if temperature == 1 else teacher / temperature).log_softmax(-1)
        student = (student if temperature == 1 else student / temperature).log_softmax(-1)
    else:
        teacher, student = teacher / temperature, student / temperature
        normalisers = torch.stack([student.logsumexp(-1), teacher.logsumexp(-1)])
        normalisers = all_gather_parts(normalisers, shard.group).logsumexp(0)
        student.sub_(normalisers[0].unsqueeze(-1))
        teacher.sub_(normalisers[1].unsqueeze(-1))
    if kind == "forward":
        probabilities = teacher.exp()
        (divergences,) = _sum_columns([teacher.sub_(student).mul_(probabilities)], shard)
        gradient = student.exp_().sub_(probabilities)
    elif kind == "reverse":
        ratio, probabilities = teacher.neg_().add_(student), student.exp_()
        (divergences,) = _sum_columns([probabilities * ratio], shard)
        gradient = ratio.sub_(divergences.unsqueeze(-1)).mul_(probabilities)
    else:
        middle = torch.logaddexp(student, teacher).sub_(math.log(2))
        probabilities = teacher.exp()
        of_teacher = teacher.sub_(middle).mul_(probabilities).sum(-1, keepdim=True)
        ratio, probabilities = middle.neg_().add_(student), student.exp_()
        of_student, of_teacher = _sum_columns([probabilities * ratio, of_teacher], shard)
        divergences = (of_student + of_teacher) / 2
        gradient = ratio.sub_(of_student.unsqueeze(-1)).mul_(probabilities).div_(2)
    return divergences * temperature**2, gradient.mul_(temperature)


def _sum_columns(values: list[torch.Tensor], shard: VocabularyShard | None) -> torch.Tensor:
    """Sums of each of ``values``, (rows, any), over all columns; (len(values), rows)."""
    sums = torch.stack([value.sum(-1) for value in values])
    return sums if shard is None else all_gather_parts(sums, shard.group).sum(0)


class _Mixture:
    """Mixture of divergence and cross-entropy over chunks of the student's logits."""

    def __init__(self, labels: torch.Tensor, teaching: Teaching, shard: VocabularyShard | None) -> None:
        self._counts, self._teaching, self._shard = (labels != IGNORE_INDEX).unsqueeze(1), teaching, shard
        self._labels = Labels(labels, shard)
        self._teacher_states = teaching.hidden.reshape(-1, teaching.hidden.shape[-1])
        columns = slice(None) if shard is None else slice(shard.start, shard.stop)
        self._head = teaching.weight[columns], None if teaching.bias is None else teaching.bias[columns]
        self._sums = torch.zeros(2, dtype=torch.float64, device=labels.device)

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        keys, counts = self._teaching.keys, self._counts[rows]
        divergences, grad = token_divergences(
            logits,
            F.linear(self._teacher_states[rows], *self._head).float(),
            keys.divergence,
            keys.temperature,
            self._shard,
        )
        losses, normaliser = self._labels.losses(rows, logits)
        self._sums[0] += losses.sum(dtype=torch.float64)
        self._sums[1] += divergences.masked_fill_(~counts.squeeze(1), 0.0).sum(dtype=torch.float64)
        if not wants_gradient:
            return None
        plain = self._labels.gradient_(rows, logits, normaliser)
        return plain.mul_(1 - keys.teacher_weight).add_(grad.masked_fill_(~counts, 0.0), alpha=keys.teacher_weight)

    def total(self) -> torch.Tensor:
        self._teaching.sums, share = self._sums, self._teaching.keys.teacher_weight
        return (1 - share) * self._sums[0] + share * self._sums[1]


def linear_distillation(head: ChunkedHead, teaching: Teaching) -> torch.Tensor:
    """Mixture of divergence and cross-entropy, summed over the labels' tokens; a float64 scalar.

    Args:
        head: the student's, with its hidden states. The teacher's head is whole, also where this one is a ``shard``.
        teaching: receives the two sums of the loss.
    """
    # Three tensors of logits' size, so that this takes the memory of a plain cross-entropy.
    return head.sum_loss(_Mixture(head.targets, teaching, head.shard), heads=3)
