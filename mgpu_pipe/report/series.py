"""What is done to a series of measurements before it is drawn: smoothing, and fewer points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

MOST_POINTS = 2000
FEWEST_SMOOTHED = 30
"""Shorter series are drawn as they are."""
LARGEST, LAST_STEP = 1e100, 1 << 40
"""A file of metrics may say more than a chart, whose ticks are floats, can hold."""

Points = list[tuple[float, float]]


def points(steps: Sequence[float], values: Sequence[float]) -> Points:
    """The pairs that a chart can hold: a finite value, and a step later than the one before."""
    kept: Points = []
    for step, value in zip(steps, values, strict=False):
        if abs(value) <= LARGEST and (kept[-1][0] if kept else -1) < step <= LAST_STEP:
            kept.append((step, value))
    return kept


def smoothed(series: Points) -> Points:
    """Centred moving average, twice (a triangular window), each over about a fiftieth of the points.

    Centred, so that the curve does not lag behind a loss that falls fast.
    """
    if len(series) < FEWEST_SMOOTHED:
        return list(series)
    reach = max(3, len(series) // 100)
    values = [value for _, value in series]
    for _ in range(2):
        values = _centred_mean(values, reach)
    return [(step, value) for (step, _), value in zip(series, values, strict=True)]


def _centred_mean(values: Sequence[float], reach: int) -> list[float]:
    """Means over ``reach`` values on each side: fewer at the start, where a loss is steep, on both sides alike; fewer
    to the right at the end, where it is flat and a lone last value would make the curve jump."""
    sums = [0.0, *accumulate(values)]
    means = []
    for at in range(len(values)):
        side = min(reach, at)
        first, end = at - side, min(len(values), at + side + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def thinned(series: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` points: of each of ``most / 2`` equal stretches the lowest and the highest, and both ends."""
    if len(series) <= most:
        return list(series)
    inner, stretches = series[1:-1], (most - 2) // 2
    kept = [series[0]]
    for at in range(stretches):
        stretch = inner[at * len(inner) // stretches : (at + 1) * len(inner) // stretches]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        kept += [low] if low is high else sorted((low, high))
    return [*kept, series[-1]]


def _value(point: tuple[float, float]) -> float:
    return point[1]
