"""Losses of similarities and scores, with their gradients, without a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def pairing_losses(
    queries: torch.Tensor,
    keys: torch.Tensor,
    rows: slice,
    gradients: tuple[torch.Tensor, torch.Tensor] | None,
    pairing: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    stride: int = 1,
    hide: Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Losses of finding the key ``stride * i`` of query i, for the queries in ``rows``, (rows,).

    Logits of at most a quarter of the rows exist at a time, and take at most a quarter of the keys' memory.

    Args:
        gradients: buffers of queries and keys, to which the gradients of the summed losses are added.
        pairing: losses of logits and right columns, in place: the logits become their gradients.
            Default: :func:`softmax_pairing`.
        hide: mask of the logits that count nothing, of rows, their logits and right columns. A right one counts.
    """
    at_once = max(1, min(keys.shape[1], rows.stop - rows.start) // 4)
    losses = [queries.new_zeros(0)]
    for begin in range(rows.start, rows.stop, at_once):
        some = slice(begin, min(begin + at_once, rows.stop))
        right = stride * torch.arange(some.start, some.stop, device=keys.device)[:, None]
        logits = queries[some] @ keys.T
        if hide is not None:
            logits.masked_fill_(hide(some, logits, right).scatter(1, right, False), -torch.inf)
        losses.append((pairing or softmax_pairing)(logits, right))
        if gradients is not None:
            gradients[0][some].addmm_(logits, keys)
            gradients[1].addmm_(logits.T, queries[some])
        del logits  # frees memory before the next ones
    return torch.cat(losses)


def softmax_pairing(logits: torch.Tensor, right_column: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of rows, (rows,), to ``right_column``, (rows, 1); ``logits``, (rows, columns), become its
    gradients."""
    highest = logits.amax(1, keepdim=True)
    right = logits.gather(1, right_column) - highest
    total = logits.sub_(highest).exp_().sum(1, keepdim=True)
    logits.div_(total).scatter_add_(1, right_column, torch.full_like(right, -1))
    return (total.log() - right).squeeze(1)


def cosent(similarities: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """CoSENT's loss of all pairs together, and its gradients by the similarities, (pairs,); without a graph.

    ``log(1 + sum exp(s_i - s_j))`` over all i and j where j has the higher score (Huang et al. 2024,
    doi:10.1109/TASLP.2024.3402087). Sorted, so that no square matrix exists.

    Args:
        similarities: scaled, (pairs,).
        scores: (pairs,); equal ones are not compared.
    """
    scores, order = scores.sort(stable=True)
    values = similarities[order]
    nothing = values.new_full((1,), -torch.inf)
    higher = torch.cat([(-values).flip(0).logcumsumexp(0).flip(0), nothing])[
        torch.searchsorted(scores, scores, right=True)
    ]
    lower = torch.cat([nothing, values.logcumsumexp(0)])[torch.searchsorted(scores, scores)]
    loss = torch.cat([values.new_zeros(1), values + higher]).logsumexp(0)
    sorted_gradients = (values + higher - loss).exp() - (lower - values - loss).exp()
    return loss, torch.empty_like(values).scatter_(0, order, sorted_gradients)


def shares_of_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Part of each pair of values in Pearson's correlation, their sum; float64 (pairs,), nan where a side is
    constant."""
    sides = [side.double() - side.double().mean() for side in (first, second)]
    first, second = (side / side.norm() for side in sides)
    return first * second


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Rank of each value, (values,), float64; equal values have the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[place]


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
