"""Which charts a report has, from the columns that its runs measured."""

from __future__ import annotations

import math
from dataclasses import replace

from markupsafe import Markup

from mgpu_pipe.report.plots import Curve, chart
from mgpu_pipe.report.run_view import RunView, differing
from mgpu_pipe.report.series import Points, points, smoothed
from mgpu_pipe.runs.metrics_file import METRIC_COLUMNS

HELD_OUT_COLOR = 1
LONGEST_LABEL = 48
"""Characters of what differs that a legend has room for."""


def charts(views: list[RunView]) -> list[Markup]:
    """Loss over the whole width, then the others two by two; a column that no run has gets no chart."""
    drawn = [
        _loss(views),
        chart("Learning rate", _curves(views, "lr"), from_zero=True),
        chart("Gradient norm", _curves(views, "train/grad_norm", smooth=True), unit="before clipping", log=True),
        chart("Throughput", _curves(views, "throughput/tokens_per_s", smooth=True), unit="tokens/s", from_zero=True),
        chart("Memory", _curves(views, "memory/peak_gib"), unit="peak of a process, GiB", from_zero=True),
    ]
    if any(_measured(view, "throughput/mfu") for view in views):
        share = _curves(views, "throughput/mfu", smooth=True)
        drawn.append(chart("Model FLOPs utilisation", share, unit="share of the peak", from_zero=True))
    extra = [name for view in views for name in view.metrics if name not in METRIC_COLUMNS]
    drawn += [
        chart(name, _curves(views, name, smooth=True))
        for name in dict.fromkeys(extra)
        if any(_measured(view, name) for view in views)
    ]
    return drawn


def run_labels(views: list[RunView]) -> list[str]:
    """A label for each run; where several are compared, its number and what sets it apart."""
    if len(views) == 1:
        return [views[0].name]
    apart = [" ".join(items) for items in differing(views)]
    telling = all(apart) and len(set(apart)) == len(apart) and max(map(len, apart)) <= LONGEST_LABEL
    names = apart if telling else run_names(views)
    return [f"{number} · {name}" for number, name in enumerate(names, 1)]


def run_names(views: list[RunView]) -> list[str]:
    """Each run's name, or, where some share one, its folder's."""
    alone = len({view.name for view in views}) == len(views)
    return [view.name if alone else view.folder_name for view in views]


def _loss(views: list[RunView]) -> Markup:
    if len(views) > 1:
        train = _curves(views, "train/loss", smooth=True)
        named = [replace(curve, legend=label) for curve, label in zip(train, run_labels(views), strict=True)]
        held_out = [
            replace(curve, label=f"{curve.label}, held out", style="dots", legend="")
            for curve in _curves(views, "val/loss")
        ]
        return chart("Loss", [*named, *held_out], unit="train, smoothed; dots: held out", wide=True)
    view = views[0]
    unigram = view.baseline
    reference = ("unigram baseline", math.log(unigram)) if unigram > 0 and math.isfinite(unigram) else None
    train = [
        replace(curve, label=f"train, {curve.label}", legend="" if curve.style == "raw" else "train")
        for curve in _one(view, "train/loss", smooth=True)
    ]
    held_out = [Curve("held out", _measured(view, "val/loss"), HELD_OUT_COLOR, "dots", legend="held out")]
    return chart("Loss", [*train, *held_out], unit=view.objective.metrics[0].unit, reference=reference, wide=True)


def _curves(views: list[RunView], column: str, smooth: bool = False) -> list[Curve]:
    """One curve a run; a run alone shows its smoothed curve over the raw one."""
    if len(views) == 1:
        return _one(views[0], column, smooth)
    curves = []
    for color, view in enumerate(views):
        measured, label = _measured(view, column), str(color + 1)
        curves.append(Curve(label, smoothed(measured) if smooth else measured, color, legend=label))
    return curves


def _one(view: RunView, column: str, smooth: bool) -> list[Curve]:
    measured = _measured(view, column)
    even = smoothed(measured) if smooth else measured
    if even == measured:
        return [Curve("value", measured, 0)]
    return [Curve("each step", measured, 0, "raw"), Curve("smoothed", even, 0)]


def _measured(view: RunView, column: str) -> Points:
    return points(view.metrics.get("step", []), view.metrics.get(column, []))
