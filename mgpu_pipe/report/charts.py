"""Which charts a report has, from the columns that its runs measured, and what their x axis can be."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from mgpu_pipe.config.plain_files import NotPlainError
from mgpu_pipe.report.plots import ALL_POINTS, Curve, Style, chart, rounded
from mgpu_pipe.report.run_view import RunView, differing
from mgpu_pipe.report.series import MOST_POINTS, Points, points, smoothed
from mgpu_pipe.runs.metrics_file import METRIC_COLUMNS
from mgpu_pipe.runs.rank_metrics import read_ranks

HELD_OUT = 1
"""The held-out curve's number beside the training loss, which is 0."""
RAW = "raw"
"""The legend's key of what was measured at each step, under the smoothed curves."""
MOST_KEYS = 8
"""Of the legends of small charts; where there are more runs, the loss chart's switches them."""
LONGEST_LABEL = 48
"""Characters of what differs that a legend has room for."""
MOST_RANKS = 8
"""Whose curves one chart tells apart; the tables below have all ranks."""
CLOCK_POINTS = 400
"""Between them, tokens and time follow a straight line."""
TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))


def charts(views: list[RunView]) -> list[dict[str, Any]]:
    """Loss over the whole width, then the others two by two; a column that no run has gets no chart."""
    most = max(100, min(MOST_POINTS, ALL_POINTS // (8 * len(views))))
    drawn = [_loss(views, most)]
    tokens = [rate for view in views for _, rate in _measured(view, "throughput/tokens_per_s")]
    rate = "samples" if tokens and not any(tokens) else "tokens"  # nobody counts the tokens of pictures
    for title, column, options in (
        ("Learning rate", "lr", {"up": "learning rate", "from_zero": True}),
        ("Gradient norm", "train/grad_norm", {"up": "norm", "note": "before clipping", "log": True}),
        ("Throughput", f"throughput/{rate}_per_s", {"up": f"{rate}/s", "from_zero": True}),
        ("Step time", "throughput/step_s", {"up": "s", "note": "evaluation and saving left out", "from_zero": True}),
        ("Memory", "memory/peak_gib", {"up": "GiB", "note": "peak of a process", "from_zero": True}),
        ("Model FLOPs utilisation", "throughput/mfu", {"up": "share of the peak", "from_zero": True}),
    ):
        if column != "throughput/mfu" or any(_measured(view, column) for view in views):
            smooth = column not in ("lr", "memory/peak_gib")
            drawn.append(chart(title, _curves(views, column, smooth), most=most, **options))  # type: ignore[arg-type]
    extra = [name for view in views for name in view.metrics if name not in METRIC_COLUMNS]
    drawn += [
        chart(_title(views[0], name), _curves(views, name, smooth=True), up=name, most=most)
        for name in dict.fromkeys(extra)
        if any(_measured(view, name) for view in views)
    ]
    return drawn + (_by_rank(views[0]) if len(views) == 1 else [])


def _title(view: RunView, column: str) -> str:
    metric = view.objective.metric(column)
    return metric.title.capitalize() if metric else column


def _by_rank(view: RunView) -> list[dict[str, Any]]:
    """Memory and times of each of several ranks; the first ones, where there are many."""
    try:
        ranks = read_ranks(view.paths, MOST_RANKS)
    except (OSError, NotPlainError) as error:
        view.problems.append(str(error))
        return []
    world = view.summary.get("world_size")
    more = f"; ranks 0 to {MOST_RANKS - 1} of {world:,}" if isinstance(world, int) and world > MOST_RANKS else ""
    drawn = []
    for title, column, up, note in (
        ("Memory of each rank", "peak_gib", "GiB", "peak of each process"),
        ("Processor time of each rank", "cpu_s", "s a step", "of its process"),
        ("Waiting for data of each rank", "data_s", "s a step", "before the step"),
    ):
        curves = []
        for rank, table in ranks.items():
            series = points(table["step"], table.get(column, []))
            series = series if column == "peak_gib" else smoothed(series)
            curves.append(Curve(f"rank {rank}", series, rank, keys=(f"rank{rank}",), legend=f"rank {rank}"))
        if any(curve.points for curve in curves):
            drawn.append(chart(title, curves, up=up, note=f"{note}{more}", from_zero=True, most=MOST_POINTS // 4))
    return drawn


def x_axes(views: list[RunView]) -> dict[str, Any]:
    """What the x axis can be, and, for each run, steps with what each axis shows at them."""
    clocks = [clock(view) for view in views]
    longest = max((one[2][-1] for one in clocks if len(one) == 3), default=0.0)
    size, unit = next((size, unit) for least, size, unit in TIME_UNITS if longest >= least)
    names = ["step", "tokens", f"training time, {unit}"]
    if any(one[0] and len(one) < 3 for one in clocks):
        return {"axes": names[:1], "clocks": [one[:1] for one in clocks]}
    for one in clocks:
        one[2:] = [[rounded(second / size) for second in one[2]]] if one[0] else []
    return {"axes": names, "clocks": clocks}


def clock(view: RunView) -> list[list[float]]:
    """Steps, tokens that the model computed until then, and seconds of training; evaluation and saving left out.

    Rows that were not logged are taken to be like the one after them. Steps alone where no time was measured.
    """
    rates = dict(_measured(view, "throughput/tokens_per_s"))
    timed = _measured(view, "throughput/step_s")
    rows = [(step, seconds) for step, seconds in timed if seconds > 0 and rates.get(step, -1.0) >= 0]
    if not rows:
        return [[step for step, _ in _measured(view, "train/loss")]]
    steps, tokens, time = [0.0], [0.0], [0.0]
    for (before, _), (step, seconds) in pairwise([(0, 0.0), *rows]):
        steps.append(step)
        tokens.append(tokens[-1] + rates[step] * seconds * (step - before))
        time.append(time[-1] + seconds * (step - before))
    every = max(1, len(steps) // CLOCK_POINTS)
    kept = sorted({*range(0, len(steps), every), len(steps) - 1})
    return [[steps[at] for at in kept], [round(tokens[at]) for at in kept], [time[at] for at in kept]]


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


def _loss(views: list[RunView], most: int) -> dict[str, Any]:
    up = ", ".join(filter(None, ("loss", views[0].objective.metrics[0].unit)))
    if len(views) > 1:
        train = _compared(views, "train/loss", run_labels(views), smooth=True)
        held_out = _compared(views, "val/loss", [], style="dots")
        return chart("Loss", [*train, *held_out], up=up, note="smoothed; dots: held out", wide=True, most=most)
    view = views[0]
    train = _one(view, "train/loss", smooth=True, name="train")
    held_out = [Curve("held out", _measured(view, "val/loss"), HELD_OUT, "dots", ("held_out",), legend="held out")]
    seen = [value for curve in (*train, *held_out) for _, value in curve.points]
    level = math.log(view.baseline) if 0 < view.baseline < math.inf else math.nan
    if seen and min(seen) < level < max(seen):
        steps = view.metrics["step"]
        across = [(min(steps), level), (max(steps), level)]
        held_out.append(Curve("unigram baseline", across, 7, "level", ("baseline",), legend="unigram baseline"))
    return chart("Loss", [*train, *held_out], up=up, wide=True, most=most)


def _curves(views: list[RunView], column: str, smooth: bool) -> list[Curve]:
    """One curve a run; a run alone shows its smoothed curve over the raw one."""
    if len(views) == 1:
        return _one(views[0], column, smooth)
    numbered = [str(number) for number in range(1, len(views) + 1)] if len(views) <= MOST_KEYS else []
    return _compared(views, column, numbered, smooth)


def _one(view: RunView, column: str, smooth: bool, name: str = "") -> list[Curve]:
    measured = _measured(view, column)
    even = smoothed(measured) if smooth else measured
    if even == measured:
        return [Curve(name or "value", measured, 0, keys=(name,), legend=name)]
    raw = f"{name}, each step" if name else "each step"
    return [
        Curve(raw, measured, 0, "raw", (RAW,), legend="each step" if name else ""),
        Curve(f"{name}, smoothed" if name else "smoothed", even, 0, keys=(name,), legend=name),
    ]


def _compared(
    views: list[RunView], column: str, told: list[str], smooth: bool = False, style: Style = "line"
) -> list[Curve]:
    """One curve a run; runs that measured exactly the same share one, whose label says so."""
    same: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for at, view in enumerate(views):
        same.setdefault(tuple(_measured(view, column)), []).append(at)
    curves = []
    for measured, runs in same.items():
        first = runs[0]
        equal = " = ".join(str(at + 1) for at in runs)
        shown = f"{equal} · {told[first].partition(' · ')[2]}".removesuffix(" · ") if told else equal
        series = smoothed(list(measured)) if smooth else list(measured)
        label = f"{equal}, held out" if style == "dots" else equal
        legend = f"{shown}{', identical' if len(runs) > 1 else ''}" if told else ""
        curves.append(Curve(label, series, first, style, tuple(f"run{at}" for at in runs), first, legend))
    return curves


def identical(views: list[RunView]) -> list[str]:
    """Which runs have the same training loss at every step, bit for bit; a sentence each."""
    curves = _compared(views, "train/loss", [])
    return [
        f"Runs {curve.label}: the training loss is identical at every logged step."
        for curve in curves
        if len(curve.keys) > 1 and curve.points
    ]


def _measured(view: RunView, column: str) -> Points:
    return points(view.metrics.get("step", []), view.metrics.get(column, []))
