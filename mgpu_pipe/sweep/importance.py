"""How much each parameter of a sweep matters to its metric.

The share of the metric's variance that the parameter alone explains: runs are put into bins by its value, and the
variance between the bins' means is compared with the whole (Kelley's epsilon squared, 1935: a correlation ratio without
the bias that many bins give it). Ranks stand for the metric's values, so that one diverged run does not decide. What
two parameters do together is not seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BINS = 5
"""Of a parameter with more values than this: as many runs in each."""
FEWEST = 6
"""Runs; of fewer nothing can be said."""


@dataclass(frozen=True)
class Importance:
    """Of one parameter.

    Attributes:
        share: of the variance that it explains, 0 to 1.
        trend: Spearman's rank correlation of its values with the metric, -1 to 1; NaN where they are no numbers.
    """

    key: str
    share: float
    trend: float


def importances(settings: Mapping[str, Sequence[str]], metric: Sequence[float]) -> list[Importance]:
    """Of every parameter, the largest first.

    Args:
        settings: each run's value by key.
        metric: each run's value, finite.
    """
    if len(metric) < FEWEST or len(set(metric)) < 2:
        return []
    ranks = _ranks(metric)
    found = []
    for key, values in settings.items():
        try:
            given = [float(value) for value in values]
            if any(map(math.isnan, given)):  # no place in an order
                raise ValueError
        except ValueError:
            found.append(Importance(key, _explained(values, ranks), math.nan))
            continue
        places = _ranks(given)
        size = len(places) / BINS
        bins = [math.ceil(place / size) for place in places] if len(set(given)) > BINS else given
        trend = statistics.correlation(places, ranks) if len(set(given)) > 1 else math.nan
        found.append(Importance(key, _explained(bins, ranks), trend))
    return sorted(found, key=lambda one: -one.share)


def _explained(bins: Sequence[object], values: Sequence[float]) -> float:
    """Epsilon squared, not below 0."""
    groups: dict[object, list[float]] = {}
    for one, value in zip(bins, values, strict=True):
        groups.setdefault(one, []).append(value)
    free = len(values) - len(groups)
    if free < 1:
        return 0.0
    within = math.fsum(statistics.pvariance(group) * len(group) for group in groups.values()) / free
    return max(0.0, 1 - within / statistics.variance(values))


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for at in order[start:end]:
            ranks[at] = (start + 1 + end) / 2
        start = end
    return ranks
