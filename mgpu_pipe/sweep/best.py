"""Which point of a sweep is the best, with the noise of its seeds in view."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_pipe.report import numbers
from mgpu_pipe.sweep.point import FINISHED, Point
from mgpu_pipe.sweep.store import Store

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
"""Student's t for a two-sided interval of 95%, by degrees of freedom from 1; 2 beyond."""


@dataclass(frozen=True)
class Trial:
    """A point with all its seeds.

    Attributes:
        points: its finished runs.
        mean: of the metric over them.
        error: half the width of the mean's 95% interval; NaN where no trial has two runs.
        alike: whether the noise does not tell it from the best one.
    """

    points: tuple[Point, ...]
    mean: float
    error: float
    alike: bool = False

    @property
    def first(self) -> Point:
        return self.points[0]

    def told(self) -> str:
        """The mean and its interval, as they are shown."""
        several = len(self.points) > 1 and not math.isnan(self.error)
        noise = f" ± {numbers.figure(self.error, 2)} over {len(self.points)} seeds" if several else ""
        return f"{numbers.figure(self.mean, 5)}{noise}"


def repeat_line(store: Store, point: Point | None = None) -> str:
    """The command that trains a point again, alone; without one the sweep's own."""
    if point is None:
        return shlex.join(["mgpu-pipe", *store.asked["words"]])
    verb = ["submit"] if store.asked.get("launcher") == "slurm" else []
    fixed = [word for word in store.asked["fixed"] if not word.lstrip("+~").startswith("sweep.")]
    return shlex.join(["mgpu-pipe", *verb, *store.asked["flags"], *fixed, *point.overrides])


def ranked(points: Sequence[Point], metric: str, minimize: bool) -> list[Trial]:
    """The trials whose runs all finished, the best first.

    The spread between seeds is pooled over all trials. The best trial is the one with the best end of its mean's
    standard error, so that a single lucky run does not win over a mean of several.
    """
    by_trial: dict[int, list[Point]] = {}
    for point in points:
        by_trial.setdefault(point.trial, []).append(point)
    whole = [runs for runs in by_trial.values() if _measured(runs, metric)]
    values = [[run.metric(metric) for run in runs] for runs in whole]
    freedom = sum(len(one) - 1 for one in values)
    squares = sum(math.fsum((value - _mean(one)) ** 2 for value in one) for one in values)
    spread = math.sqrt(squares / freedom) if freedom else math.nan
    t = T_95[freedom - 1] if 0 < freedom <= len(T_95) else 2.0
    sign = 1.0 if minimize else -1.0
    noise = 0.0 if math.isnan(spread) else spread

    def worst_end(at: int) -> tuple[float, int]:
        return sign * _mean(values[at]) + noise / math.sqrt(len(values[at])), whole[at][0].number

    order = sorted(range(len(whole)), key=worst_end)
    trials = []
    for place, at in enumerate(order):
        best = values[order[0]]
        apart = sign * (_mean(values[at]) - _mean(best))
        told_from = t * noise * math.sqrt(1 / len(values[at]) + 1 / len(best))
        error = t * spread / math.sqrt(len(values[at]))
        trials.append(Trial(tuple(whole[at]), _mean(values[at]), error, place > 0 and apart < told_from))
    return trials


def pareto(points: Sequence[Point], metrics: Sequence[str], minimize: Sequence[bool]) -> list[Point]:
    """The finished points that no other one equals or beats in every metric, ordered by the first."""

    def costs(point: Point) -> list[float]:
        return [point.metric(name) * (1 if lower else -1) for name, lower in zip(metrics, minimize, strict=True)]

    whole = [(costs(point), point) for point in points if point.status == FINISHED]
    whole = [(cost, point) for cost, point in whole if not any(map(math.isnan, cost))]
    front = [
        (cost, point)
        for cost, point in whole
        if not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in whole)
    ]
    return [point for _, point in sorted(front, key=lambda one: (one[0], one[1].number))]


def _measured(runs: Sequence[Point], metric: str) -> bool:
    """Whether all runs of a trial that began and were not stopped finished, and were measured."""
    return all(run.status == FINISHED and not math.isnan(run.metric(metric)) for run in runs)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
