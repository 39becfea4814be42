"""Builds a report's charts from the measured columns of its runs, and the values of their x axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from mgpu_pipe.report import numbers
from mgpu_pipe.report.run_view import RunView, differing
from mgpu_pipe.runs.metrics_file import METRIC_COLUMNS, read_ranks
from mgpu_pipe.system.local_files import NotPlainError

MOST_POINTS = 2000
FEWEST_SMOOTHED = 30
"""Points of the shortest series that is smoothed."""
LARGEST, LAST_STEP = 1e100, 1 << 40
"""Largest value and step of a chart, whose ticks are floats; the script drops larger ones."""

Points = list[tuple[float, float]]


def points(steps: Sequence[float], values: Sequence[float]) -> Points:
    """The pairs that a chart can show: finite values at increasing steps."""
    drawable: Points = []
    for step, value in zip(steps, values, strict=False):
        if abs(value) <= LARGEST and (drawable[-1][0] if drawable else -1) < step <= LAST_STEP:
            drawable.append((step, value))
    return drawable


def smooth_series(series: Points) -> Points:
    """Centred moving average, twice (a triangular window), each over about a fiftieth of the points.

    A centred window does not lag behind a loss that falls fast.
    """
    if len(series) < FEWEST_SMOOTHED:
        return list(series)
    reach = max(3, len(series) // 100)
    values = [value for _, value in series]
    for _ in range(2):
        values = _centred_mean(values, reach)
    return [(step, value) for (step, _), value in zip(series, values, strict=True)]


def _centred_mean(values: Sequence[float], reach: int) -> list[float]:
    """Means over ``reach`` values on each side: at the start both shrink (a loss is steep), at the end the right
    one."""
    sums = [0.0, *accumulate(values)]
    means = []
    for center in range(len(values)):
        side = min(reach, center)
        first, end = center - side, min(len(values), center + side + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def thin_series(series: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` points: both ends, and the lowest and highest of each of ``most / 2`` equal stretches."""
    if len(series) <= most:
        return list(series)
    inner, stretches = series[1:-1], (most - 2) // 2
    thin = [series[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        low, high = min(stretch, key=_value), max(stretch, key=_value)
        thin += [low] if low is high else sorted((low, high))
    return [*thin, series[-1]]


def _value(point: tuple[float, float]) -> float:
    return point[1]


ALL_POINTS = 60_000
"""Most points in all charts of a page, so that comparisons of many runs stay small."""
DIGITS = 6
"""Significant digits of a value in a chart."""

Style = Literal["line", "raw", "dots", "level"]


@dataclass(frozen=True)
class Curve:
    """One curve: ``raw`` is faint, ``dots`` marks each measurement, ``level`` is a line across the chart.

    Attributes:
        keys: legend entries that switch the curve; it is visible while one of them is on.
        number: picks the colour and dashes.
        run: the run's index, for its steps.
        legend: text of the legend entry; empty for none.
    """

    label: str
    points: Points
    number: int
    style: Style = "line"
    keys: tuple[str, ...] = ()
    run: int = 0
    legend: str = ""


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    up: str = "",
    note: str = "",
    from_zero: bool = False,
    log: bool = False,
    wide: bool = False,
    most: int = MOST_POINTS,
) -> dict[str, Any]:
    """A chart of curves over steps.

    Args:
        title: heading of the chart.
        curves: to draw; skips those without points.
        up: name of the value axis.
        note: shown after the title.
        from_zero: the value axis begins at 0.
        log: the value axis is logarithmic at first, if all values are positive and far enough apart.
        wide: takes the whole width of the page.
        most: largest number of points of a curve.

    Returns:
        ``title``, ``note``, ``wide``, ``legend`` and ``spoken`` for the template, ``drawn`` for the script.
    """
    nonempty = [curve for curve in curves if curve.points]
    values = [value for curve in nonempty for _, value in curve.points]
    return {
        "title": title,
        "note": note,
        "wide": wide,
        "legend": legend(nonempty),
        "spoken": _describe_chart(title, nonempty),
        "drawn": {
            "up": up,
            "zero": from_zero,
            "log": log and bool(values) and min(values) > 0 and max(values) > 20 * min(values),
            "curves": [_curve_values(curve, most) for curve in nonempty],
        },
    }


def legend(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Legend entries of the curves; none where a single curve needs no name."""
    labelled = [curve for curve in curves if curve.legend]
    if len(labelled) < 2 and not any(len(curve.keys) > 1 for curve in labelled):
        return []
    return [
        {"switches": " ".join(curve.keys), "text": curve.legend, "number": curve.number, "style": curve.style}
        for curve in labelled
    ]


def _curve_values(curve: Curve, most: int) -> dict[str, Any]:
    """The values of a curve for the page's script."""
    points = thin_series(curve.points, most)
    return {
        "label": curve.label,
        "number": curve.number,
        "style": curve.style,
        "keys": curve.keys,
        "run": curve.run,
        "x": [step for step, _ in points],
        "y": [round_figures(value) for _, value in points],
    }


def round_figures(value: float) -> float:
    """``value`` with :data:`DIGITS` digits; tiny values become 0, because ticks cannot resolve them."""
    return 0.0 if abs(value) < 1 / LARGEST else float(f"{value:.{DIGITS}g}")


def _describe_chart(title: str, curves: Sequence[Curve]) -> str:
    """The chart in words, for screen readers."""
    parts = [
        f"{curve.label}: {numbers.figure(curve.points[0][1])} at step {curve.points[0][0]:,.0f}, "
        f"{numbers.figure(curve.points[-1][1])} at step {curve.points[-1][0]:,.0f}"
        for curve in curves
        if curve.style not in ("raw", "level")
    ]
    return f"{title}. {'; '.join(parts)}"


HELD_OUT = 1
"""The held-out curve's number; the training loss has number 0."""
RAW = "raw"
"""Legend entry of the unsmoothed measurements."""
MOST_KEYS = 8
"""Most legend entries of a small chart; with more runs, only the loss chart has a legend."""
LONGEST_LABEL = 48
"""Most characters of a run's differences in a legend."""
MOST_RANKS = 8
"""Most ranks with a curve in one chart; the tables have all ranks."""
CLOCK_POINTS = 400
"""Points of the x axes; between them, tokens and time are interpolated linearly."""
TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (300.0, 60.0, "min"), (0.0, 1.0, "s"))


def charts(views: list[RunView]) -> list[dict[str, Any]]:
    """The loss chart, which is wide, then a chart for each column that a run has."""
    most = max(100, min(MOST_POINTS, ALL_POINTS // (8 * len(views))))
    built = [_loss(views, most)]
    tokens = [rate for view in views for _, rate in _measured_points(view, "throughput/tokens_per_s")]
    rate = "samples" if tokens and not any(tokens) else "tokens"  # runs on pictures count no tokens
    for title, column, options in (
        ("Learning rate", "lr", {"up": "learning rate", "from_zero": True}),
        ("Gradient norm", "train/grad_norm", {"up": "norm", "note": "before clipping", "log": True}),
        ("Throughput", f"throughput/{rate}_per_s", {"up": f"{rate}/s", "from_zero": True}),
        ("Step time", "throughput/step_s", {"up": "s", "note": "evaluation and saving left out", "from_zero": True}),
        ("Memory", "memory/peak_gib", {"up": "GiB", "note": "peak of a process", "from_zero": True}),
        ("Model FLOPs utilisation", "throughput/mfu", {"up": "share of the peak", "from_zero": True}),
    ):
        if column != "throughput/mfu" or any(_measured_points(view, column) for view in views):
            smooth = column not in ("lr", "memory/peak_gib")
            built.append(chart(title, _curves(views, column, smooth), most=most, **options))  # type: ignore[arg-type]
    extra = [name for view in views for name in view.metrics if name not in METRIC_COLUMNS]
    built += [
        chart(_title(views[0], name), _curves(views, name, smooth=True), up=name, most=most)
        for name in dict.fromkeys(extra)
        if any(_measured_points(view, name) for view in views)
    ]
    return built + (_by_rank(views[0]) if len(views) == 1 else [])


def _title(view: RunView, column: str) -> str:
    metric = view.objective.metric(column)
    return numbers.capitalize(metric.title) if metric else column


def _by_rank(view: RunView) -> list[dict[str, Any]]:
    """Charts of memory and times by rank, for the first :data:`MOST_RANKS` ranks."""
    try:
        ranks = read_ranks(view.paths, MOST_RANKS)
    except (OSError, NotPlainError) as error:
        view.problems.append(str(error))
        return []
    world = view.summary.get("world_size")
    more = f"; ranks 0 to {MOST_RANKS - 1} of {world:,}" if isinstance(world, int) and world > MOST_RANKS else ""
    built = []
    for title, column, up, note in (
        ("Memory of each rank", "peak_gib", "GiB", "peak of each process"),
        ("Processor time of each rank", "cpu_s", "s a step", "of its process"),
        ("Waiting for data of each rank", "data_s", "s a step", "before the step"),
    ):
        curves = []
        for rank, table in ranks.items():
            series = points(table["step"], table.get(column, []))
            series = series if column == "peak_gib" else smooth_series(series)
            curves.append(Curve(f"rank {rank}", series, rank, keys=(f"rank{rank}",), legend=f"rank {rank}"))
        if any(curve.points for curve in curves):
            built.append(chart(title, curves, up=up, note=f"{note}{more}", from_zero=True, most=MOST_POINTS // 4))
    return built


def x_axes(views: list[RunView]) -> dict[str, Any]:
    """The names of the x axes, and for each run the values of each axis at some steps."""
    clocks = [clock(view) for view in views]
    longest = max((run_clock[2][-1] for run_clock in clocks if len(run_clock) == 3), default=0.0)
    size, unit = next((size, unit) for least, size, unit in TIME_UNITS if longest >= least)
    names = ["step", "tokens", f"training time, {unit}"]
    if any(run_clock[0] and len(run_clock) < 3 for run_clock in clocks):
        return {"axes": names[:1], "clocks": [run_clock[:1] for run_clock in clocks]}
    for run_clock in clocks:
        run_clock[2:] = [[round_figures(second / size) for second in run_clock[2]]] if run_clock[0] else []
    return {"axes": names, "clocks": clocks}


def clock(view: RunView) -> list[list[float]]:
    """Steps, tokens computed up to each, and seconds of training without evaluation and saving.

    Steps between logged rows count like the next row. Without measured times the result is only the steps.
    """
    rates = dict(_measured_points(view, "throughput/tokens_per_s"))
    timed = _measured_points(view, "throughput/step_s")
    rows = [(step, seconds) for step, seconds in timed if seconds > 0 and rates.get(step, -1.0) >= 0]
    if not rows:
        return [[step for step, _ in _measured_points(view, "train/loss")]]
    steps, tokens, time = [0.0], [0.0], [0.0]
    for (before, _), (step, seconds) in pairwise([(0, 0.0), *rows]):
        steps.append(step)
        tokens.append(tokens[-1] + rates[step] * seconds * (step - before))
        time.append(time[-1] + seconds * (step - before))
    every = max(1, len(steps) // CLOCK_POINTS)
    indices = sorted({*range(0, len(steps), every), len(steps) - 1})
    return [
        [steps[index] for index in indices],
        [round(tokens[index]) for index in indices],
        [time[index] for index in indices],
    ]


def run_labels(views: list[RunView]) -> list[str]:
    """A label for each run; for several, its number and its differences or name."""
    if len(views) == 1:
        return [views[0].name]
    apart = [" ".join(items) for items in differing(views)]
    distinguishes = all(apart) and len(set(apart)) == len(apart) and max(map(len, apart)) <= LONGEST_LABEL
    names = apart if distinguishes else run_names(views)
    return [f"{number} · {name}" for number, name in enumerate(names, 1)]


def run_names(views: list[RunView]) -> list[str]:
    """Each run's name, or its folder's name where names repeat."""
    is_unique = len({view.name for view in views}) == len(views)
    return [view.name if is_unique else view.folder_name for view in views]


def _loss(views: list[RunView], most: int) -> dict[str, Any]:
    up = ", ".join(filter(None, ("loss", views[0].objective.metrics[0].unit)))
    if len(views) > 1:
        train = _comparison_curves(views, "train/loss", run_labels(views), smooth=True)
        held_out = _comparison_curves(views, "val/loss", [], style="dots")
        return chart("Loss", [*train, *held_out], up=up, note="smoothed; dots: held out", wide=True, most=most)
    view = views[0]
    train = _smoothed_curves(view, "train/loss", smooth=True, name="train")
    held_out = [
        Curve("held out", _measured_points(view, "val/loss"), HELD_OUT, "dots", ("held_out",), legend="held out")
    ]
    values = [value for curve in (*train, *held_out) for _, value in curve.points]
    level = math.log(view.baseline) if 0 < view.baseline < math.inf else math.nan
    if values and min(values) < level < max(values):
        steps = view.metrics["step"]
        line = [(min(steps), level), (max(steps), level)]
        held_out.append(Curve("unigram baseline", line, 7, "level", ("baseline",), legend="unigram baseline"))
    return chart("Loss", [*train, *held_out], up=up, wide=True, most=most)


def _curves(views: list[RunView], column: str, smooth: bool) -> list[Curve]:
    """One curve per run; a single run gets its smoothed curve over the raw one."""
    if len(views) == 1:
        return _smoothed_curves(views[0], column, smooth)
    numbered = [str(number) for number in range(1, len(views) + 1)] if len(views) <= MOST_KEYS else []
    return _comparison_curves(views, column, numbered, smooth)


def _smoothed_curves(view: RunView, column: str, smooth: bool, name: str = "") -> list[Curve]:
    measured = _measured_points(view, column)
    smooth_points = smooth_series(measured) if smooth else measured
    if smooth_points == measured:
        return [Curve(name or "value", measured, 0, keys=(name,), legend=name)]
    raw = f"{name}, each step" if name else "each step"
    return [
        Curve(raw, measured, 0, "raw", (RAW,), legend="each step" if name else ""),
        Curve(f"{name}, smoothed" if name else "smoothed", smooth_points, 0, keys=(name,), legend=name),
    ]


def _comparison_curves(
    views: list[RunView], column: str, labels: list[str], smooth: bool = False, style: Style = "line"
) -> list[Curve]:
    """One curve per run; runs with exactly the same measurements share one, and its label says so."""
    same: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for index, view in enumerate(views):
        same.setdefault(tuple(_measured_points(view, column)), []).append(index)
    curves = []
    for series_of_runs, runs in same.items():
        first = runs[0]
        equal = " = ".join(str(index + 1) for index in runs)
        text = f"{equal} · {labels[first].partition(' · ')[2]}".removesuffix(" · ") if labels else equal
        series = smooth_series(list(series_of_runs)) if smooth else list(series_of_runs)
        label = f"{equal}, held out" if style == "dots" else equal
        legend = f"{text}{', identical' if len(runs) > 1 else ''}" if labels else ""
        curves.append(Curve(label, series, first, style, tuple(f"run{index}" for index in runs), first, legend))
    return curves


def identical(views: list[RunView]) -> list[str]:
    """A sentence for each group of runs with bit-identical training losses."""
    curves = _comparison_curves(views, "train/loss", [])
    return [
        f"Runs {curve.label}: the training loss is identical at every logged step."
        for curve in curves
        if len(curve.keys) > 1 and curve.points
    ]


def _measured_points(view: RunView, column: str) -> Points:
    return points(view.metrics.get("step", []), view.metrics.get(column, []))
