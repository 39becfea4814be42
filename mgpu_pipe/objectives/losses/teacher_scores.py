"""Losses that bring scores of a query's documents to those of a teacher, with their slopes, without a graph."""

from __future__ import annotations

import torch


def margin_errors(scores: torch.Tensor, wanted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of the positive's lead over each negative (Hofstätter et al. 2020, arXiv:2010.02666).

    Args:
        scores: of the positive, then of each negative, (rows, documents).
        wanted: the teacher's scores, of the same shape.
        there: False for a document that a row does not have.

    Returns:
        The loss of each row, (rows,), and its gradient by ``scores``.
    """
    leads, wanted_leads = scores[:, :1] - scores[:, 1:], wanted[:, :1] - wanted[:, 1:]
    errors = (leads - wanted_leads).masked_fill(~there[:, 1:], 0.0)
    count = there[:, 1:].sum(1, keepdim=True).clamp_min(1)
    slopes = 2 * errors / count
    return (errors.square() / count).sum(1), torch.cat([slopes.sum(1, keepdim=True), -slopes], 1)


def divergence(scores: torch.Tensor, wanted: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kullback-Leibler divergence of the teacher's distribution over a row's documents from the model's.

    Args:
        scores, wanted, there: see :func:`margin_errors`; logits.

    Returns:
        The loss of each row, (rows,), and its gradient by ``scores``.
    """
    model = scores.masked_fill(~there, -torch.inf).log_softmax(1)
    teacher = wanted.masked_fill(~there, -torch.inf).log_softmax(1)
    losses = (teacher.exp() * (teacher - model)).masked_fill(~there, 0.0).sum(1)
    return losses, model.exp() - teacher.exp()
