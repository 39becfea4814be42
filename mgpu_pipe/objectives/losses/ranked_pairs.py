"""The order of pairs by their scores, as a loss and as correlations."""

from __future__ import annotations

import torch


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
    """The part of each pair of values in Pearson's correlation, which is their sum; float64, (pairs,).

    Not a number where all values of a side are equal.
    """
    sides = [side.double() - side.double().mean() for side in (first, second)]
    first, second = (side / side.norm() for side in sides)
    return first * second


def ranks(values: torch.Tensor) -> torch.Tensor:
    """Rank of each value, (values,), float64; equal values have the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[place]
