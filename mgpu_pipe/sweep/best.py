"""Ranks a sweep's points, taking the noise between seeds into account."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_pipe.report import numbers
from mgpu_pipe.sweep.point import FINISHED, Point
from mgpu_pipe.sweep.store import Store

BINS = 5
"""Values of a parameter beyond this number are grouped into this many bins of equal size."""
MIN_RUNS = 6
"""Importances need at least this many runs."""


@dataclass(frozen=True)
class Importance:
    """Importance of one parameter.

    Attributes:
        share: share of the variance that it explains, 0 to 1.
        trend: Spearman's rank correlation of its values with the metric, -1 to 1; NaN for values that are no numbers.
    """

    key: str
    share: float
    trend: float


def importances(settings: Mapping[str, Sequence[str]], metric: Sequence[float]) -> list[Importance]:
    """Importance of every parameter, the largest first.

    Args:
        settings: each run's value by key.
        metric: each run's value, finite.
    """
    if len(metric) < MIN_RUNS or len(set(metric)) < 2:
        return []
    ranks = _ranks(metric)
    results = []
    for key, values in settings.items():
        try:
            numeric = [float(value) for value in values]
            if any(map(math.isnan, numeric)):  # NaN has no rank
                raise ValueError
        except ValueError:
            results.append(Importance(key, _explained_share(values, ranks), math.nan))
            continue
        places = _ranks(numeric)
        size = len(places) / BINS
        bins = [math.ceil(place / size) for place in places] if len(set(numeric)) > BINS else numeric
        trend = statistics.correlation(places, ranks) if len(set(numeric)) > 1 else math.nan
        results.append(Importance(key, _explained_share(bins, ranks), trend))
    return sorted(results, key=lambda result: -result.share)


def _explained_share(bins: Sequence[object], values: Sequence[float]) -> float:
    """Epsilon squared of the grouping, at least 0."""
    groups: dict[object, list[float]] = {}
    for value_bin, value in zip(bins, values, strict=True):
        groups.setdefault(value_bin, []).append(value)
    freedom = len(values) - len(groups)
    if freedom < 1:
        return 0.0
    within = math.fsum(statistics.pvariance(group) * len(group) for group in groups.values()) / freedom
    return max(0.0, 1 - within / statistics.variance(values))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + 1 + end) / 2
        start = end
    return ranks


T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Student's t for a two-sided interval of 95%, by degrees of freedom from 1; 2 beyond."""


@dataclass(frozen=True)
class Trial:
    """A point with all its seeds.

    Attributes:
        points: finished runs.
        mean: mean of the metric over ``points``.
        error: half the width of the mean's 95% interval; NaN if no trial has two runs.
        alike: whether the noise of the seeds cannot tell it from the best trial.
    """

    points: tuple[Point, ...]
    mean: float
    error: float
    alike: bool = False

    @property
    def first(self) -> Point:
        return self.points[0]

    def text(self) -> str:
        """The mean and its interval, for tables."""
        several = len(self.points) > 1 and not math.isnan(self.error)
        noise = f" ± {numbers.figure(self.error, 2)} over {len(self.points)} seeds" if several else ""
        return f"{numbers.figure(self.mean, 5)}{noise}"


def repeat_line(store: Store, point: Point | None = None) -> str:
    """The command that trains ``point`` alone; without a point, the command of the sweep."""
    if point is None:
        return shlex.join(["mgpu-pipe", *store.spec["words"]])
    verb = ["submit"] if store.spec.get("launcher") == "slurm" else []
    fixed = [word for word in store.spec["fixed"] if not word.lstrip("+~").startswith("sweep.")]
    return shlex.join(["mgpu-pipe", *verb, *store.spec["flags"], *fixed, *point.overrides])


def rank_trials(points: Sequence[Point], metric: str, minimize: bool) -> list[Trial]:
    """Trials whose runs all finished, the best first.

    The spread between seeds is pooled over all trials. Trials are ordered by the worse end of their mean's
    standard error: one lucky run does not win over a mean of several.
    """
    by_trial: dict[int, list[Point]] = {}
    for point in points:
        by_trial.setdefault(point.trial, []).append(point)
    whole = [runs for runs in by_trial.values() if _is_measured(runs, metric)]
    values = [[run.metric(metric) for run in runs] for runs in whole]
    freedom = sum(len(group) - 1 for group in values)
    squares = sum(math.fsum((value - _mean(group)) ** 2 for value in group) for group in values)
    spread = math.sqrt(squares / freedom) if freedom else math.nan
    t = T_95[freedom - 1] if 0 < freedom <= len(T_95) else 2.0
    sign = 1.0 if minimize else -1.0
    noise = 0.0 if math.isnan(spread) else spread

    def worst_end(index: int) -> tuple[float, int]:
        return sign * _mean(values[index]) + noise / math.sqrt(len(values[index])), whole[index][0].number

    order = sorted(range(len(whole)), key=worst_end)
    trials = []
    for place, index in enumerate(order):
        best = values[order[0]]
        apart = sign * (_mean(values[index]) - _mean(best))
        margin = t * noise * math.sqrt(1 / len(values[index]) + 1 / len(best))
        error = t * spread / math.sqrt(len(values[index]))
        trials.append(Trial(tuple(whole[index]), _mean(values[index]), error, place > 0 and apart < margin))
    return trials


def pareto(points: Sequence[Point], metrics: Sequence[str], minimize: Sequence[bool]) -> list[Point]:
    """Finished points that no other point equals or beats in every metric, ordered by the first metric."""

    def costs(point: Point) -> list[float]:
        return [point.metric(name) * (1 if lower else -1) for name, lower in zip(metrics, minimize, strict=True)]

    whole = [(costs(point), point) for point in points if point.status == FINISHED]
    whole = [(cost, point) for cost, point in whole if not any(map(math.isnan, cost))]
    front = [
        (cost, point)
        for cost, point in whole
        if not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in whole)
    ]
    return [point for _, point in sorted(front, key=lambda entry: (entry[0], entry[1].number))]


def _is_measured(runs: Sequence[Point], metric: str) -> bool:
    """Whether every run of a trial finished with a value of ``metric``."""
    return all(run.status == FINISHED and not math.isnan(run.metric(metric)) for run in runs)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
