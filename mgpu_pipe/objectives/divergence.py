"""How far a student's next tokens are from a teacher's, and from the labels, without the whole logits of either.

Both heads' logits are computed for some rows at a time, and the student's gradients are formed where they are at hand,
as in :mod:`mgpu_pipe.objectives.head_chunks`. Hinton et al. 2015 (arXiv:1503.02531) for temperatures, Gu et al. 2023
(arXiv:2306.08543) for the reverse divergence, Agarwal et al. 2023 (arXiv:2306.13649) for Jensen and Shannon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.cross_entropy import Labels
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.head_chunks import rows_of, summed
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts
from mgpu_pipe.parallel.vocabulary import VocabularyShard


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
    student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float, shard: VocabularyShard | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of every row, (rows,), and its gradient for the student's logits, both times temperature squared.

    With a ``shard`` a collective call of its group, of two or three numbers a row.

    Args:
        student, teacher: fp32 logits, (rows, vocabulary).
        kind: ``forward`` is KL(teacher, student), ``reverse`` KL(student, teacher), ``jensen_shannon`` the mean of
            both to their mixture.
        shard: which columns of the vocabulary they are; None for all.
    """
    # One after the other, and in place afterwards: chunks are large, and a caller that drops its teacher's logits keeps
    # four of them alive.
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
        (found,) = _over_columns([teacher.sub_(student).mul_(probabilities)], shard)
        gradient = student.exp_().sub_(probabilities)
    elif kind == "reverse":
        ratio, probabilities = teacher.neg_().add_(student), student.exp_()
        (found,) = _over_columns([probabilities * ratio], shard)
        gradient = ratio.sub_(found.unsqueeze(-1)).mul_(probabilities)
    else:
        middle = torch.logaddexp(student, teacher).sub_(math.log(2))
        probabilities = teacher.exp()
        of_teacher = teacher.sub_(middle).mul_(probabilities).sum(-1, keepdim=True)
        ratio, probabilities = middle.neg_().add_(student), student.exp_()
        own, of_teacher = _over_columns([probabilities * ratio, of_teacher], shard)
        found = (own + of_teacher) / 2
        gradient = ratio.sub_(own.unsqueeze(-1)).mul_(probabilities).div_(2)
    return found * temperature**2, gradient.mul_(temperature)


def _over_columns(values: list[torch.Tensor], shard: VocabularyShard | None) -> torch.Tensor:
    """The sums of each of ``values``, (rows, any), over all columns; (len(values), rows)."""
    sums = torch.stack([value.sum(-1) for value in values])
    return sums if shard is None else all_gather_parts(sums, shard.group).sum(0)


class _Mixture:
    """The divergence from the teacher and the labels' cross-entropy, of chunks of the student's logits."""

    def __init__(self, labels: torch.Tensor, teaching: Teaching, shard: VocabularyShard | None) -> None:
        self._counts, self._teaching, self._shard = (labels != IGNORE_INDEX).unsqueeze(1), teaching, shard
        self._labels = Labels(labels, shard)
        self._taught = teaching.hidden.reshape(-1, teaching.hidden.shape[-1])
        held = slice(None) if shard is None else slice(shard.start, shard.stop)
        self._head = teaching.weight[held], None if teaching.bias is None else teaching.bias[held]
        self._sums = torch.zeros(2, dtype=torch.float64, device=labels.device)

    def __call__(self, rows: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor | None:
        keys, counts = self._teaching.keys, self._counts[rows]
        divergences, grad = token_divergences(
            logits, F.linear(self._taught[rows], *self._head).float(), keys.divergence, keys.temperature, self._shard
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


def linear_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk_tokens: int | str,
    teaching: Teaching,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """The loss over the tokens of ``labels``: the mixture of divergence and cross-entropy, summed; a float64 scalar.

    Args:
        hidden: (..., width) of the student, ``weight`` and ``bias`` its head's.
        labels: (...) int64; ``IGNORE_INDEX`` rows count nothing.
        chunk_tokens: rows whose logits, the student's and the teacher's, exist at once.
        shard: as of :func:`mgpu_pipe.objectives.cross_entropy.linear_cross_entropy`; the teacher's head is whole.
        teaching: takes the two sums that the loss is made of.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Of both heads, and what is computed of them: so that this takes the memory of the cross-entropy alone.
    rows = rows_of(chunk_tokens, weight, len(flat), shard, heads=3)
    return summed(flat, weight, bias, rows, _Mixture(labels.reshape(-1), teaching, shard))
