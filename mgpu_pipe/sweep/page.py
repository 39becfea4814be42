"""Report of a sweep: one page, made from its store and its runs' metrics files.

Axes are computed here as places from 0 to 1; ``report/static/sweep.js`` draws them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from mgpu_pipe import __version__
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.report import numbers
from mgpu_pipe.report.charts import Curve, Points, chart, points
from mgpu_pipe.report.html import document, link, write_page
from mgpu_pipe.report.logs import redact_override
from mgpu_pipe.report.watch import RunsPage, Served, digest, stamps
from mgpu_pipe.runs.metrics_file import read_columns
from mgpu_pipe.sweep.best import Importance, importances, pareto, rank_trials, repeat_line
from mgpu_pipe.sweep.point import FINISHED, RESUMABLE, RUNNING, Point
from mgpu_pipe.sweep.store import PAGE, Store

BEST = 5
"""Trials listed with their command."""
MANY = 12
"""The table of more runs than this scrolls in a box."""
CURVE_POINTS = 100_000
"""Points in all charts together."""
MAX_CURVE_POINTS = 400
"""Points in one run's curve."""
TICKS = 5
OTHERS = 0.4
"""Shade of runs off the Pareto front of two metrics."""
REASON = 120
"""Characters of a failure's reason."""
LOG_FROM = 20
"""An axis is logarithmic if its largest value exceeds its smallest by this factor."""


def write_sweep_page(store: Store) -> Path:
    """Write the page into the sweep's folder and return its path; RunFolderError if that fails."""
    out = store.folder / PAGE
    runs = store.points()
    links = [link(RunPaths(Path(point.folder)).report, out) if point.folder else "" for point in runs]
    return write_page(sweep_page(store, runs, links), out)


def sweep_page(store: Store, runs: Sequence[Point], links: Sequence[str], watched: str = "") -> str:
    """HTML of the page.

    Args:
        links: link to each run's report; empty without one.
        watched: see :func:`mgpu_pipe.report.html.render`.
    """
    metrics, minimize = list(store.spec["metrics"]), list(store.spec["minimize"])
    values = {metric: [point.metric(metric) for point in runs] for metric in metrics}
    settings = _settings(runs)
    front = pareto(runs, metrics, minimize) if len(metrics) == 2 else []
    shades = _shades(runs, values[metrics[0]], minimize[0], front)
    charts = _charts(runs, metrics, shades)
    axes = [axis(key, column) for key, column in settings.items()]
    axes += [axis(metric, column) for metric, column in values.items()]
    positions = {key: number for number, key in enumerate([*settings, *metrics])}
    statuses = Counter(point.status for point in runs)
    resumable = [status for status in (RUNNING, *RESUMABLE) if statuses[status]]
    return document(
        "sweep.html",
        ["charts.js", "sweep.js"],
        title=f"{store.name} · sweep",
        heading=store.name,
        status=RUNNING if statuses[RUNNING] else "unfinished" if resumable else FINISHED,
        subtitle=_subtitle(store, len(runs), statuses),
        best=_best(store, runs),
        front=_front(store, front, metrics),
        tradeoff=[positions[metric] for metric in metrics] if len(metrics) == 2 else None,
        table=_table(runs, metrics, minimize, settings, links),
        across=len(axes),
        against=[{"key": key, "x": positions[key], "y": positions[metrics[0]]} for key in settings],
        importances=_importances(runs, metrics[0], settings),
        metric=metrics[0],
        charts=charts,
        data={
            "axes": ["step"],
            "clocks": [],
            "charts": [figure["drawn"] for figure in charts],
            "pictures": axes,
            "runs": [point.number for point in runs],
            "shades": shades,
            "front": [runs.index(point) for point in front],
        },
        many=len(runs) > MANY,
        watched=watched,
        footer=f"Written by mgpu_pipe {__version__} from {store.folder} at {time.strftime('%Y-%m-%d %H:%M:%S')}",
    )


def _subtitle(store: Store, runs: int, statuses: Counter[str]) -> list[str]:
    """Lines of the command, the states of the runs and the ranking."""
    ranking = [
        f"{name}, {'lower' if lower else 'higher'} is better"
        for name, lower in zip(store.spec["metrics"], store.spec["minimize"], strict=True)
    ]
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    return [repeat_line(store), f"{runs} runs: {counts}", f"ranked by {' and '.join(ranking)}"]


class SweepPage:
    """The page of a sweep in progress, for ``sweeps report --watch``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tag(self) -> str:
        runs = self._store.points()
        return digest([(point, stamps([RunPaths(Path(point.folder)).metrics])) for point in runs])

    def text(self, tag: str) -> str:
        runs = self._store.points()
        return sweep_page(self._store, runs, [f"./{point.number}" if point.folder else "" for point in runs], tag)

    def find(self, path: str) -> Served | None:
        """This page for ``/``; the reports of its runs for ``/1``, ``/2`` ..."""
        folders = {f"/{point.number}": point.folder for point in self._store.points() if point.folder}
        return self if path == "/" else RunsPage([RunPaths(Path(folders[path]))]) if path in folders else None


def axis(name: str, column: Sequence[str | float]) -> dict[str, Any]:
    """Axis of a chart.

    Args:
        column: each run's value; an empty text or NaN if missing.

    Returns:
        ``name``; ``ticks``, pairs of a label and its place from 0 to 1; ``places``, each run's place or None.
    """
    known = [_as_number(value) for value in column if value not in ("", None)]
    if any(value is None for value in known):
        words = sorted({str(value) for value in column if value != ""})
        place = {word: (index + 0.5) / len(words) for index, word in enumerate(words)}
        return {"name": name, "ticks": list(place.items()), "places": [place.get(str(value)) for value in column]}
    numbers_or_none = [_as_number(value) for value in column]
    finite = sorted({value for value in numbers_or_none if value is not None and math.isfinite(value)})
    if not finite:
        return {"name": name, "ticks": [], "places": [None] * len(column)}
    low, high = finite[0], finite[-1]
    log = low > 0 and high > LOG_FROM * low

    def place_of(value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        if low == high:
            return 0.5
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return round(share, 4)

    tick_values = finite
    places = [place_of(value) or 0.0 for value in finite]
    if len(finite) > TICKS + 1 or any(right - left < 0.1 for left, right in pairwise(places)):
        shares = [tick / (TICKS - 1) for tick in range(TICKS)]
        tick_values = [low * (high / low) ** share if log else low + (high - low) * share for share in shares]
        decades = (
            [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
            if log
            else []
        )
        if len(decades) > 1:
            tick_values = decades[:: math.ceil(len(decades) / TICKS)]
    ticks = [(numbers.figure(value, 3), place_of(value)) for value in tick_values]
    return {"name": name, "ticks": ticks, "places": [place_of(value) for value in numbers_or_none]}


def _as_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _settings(runs: Sequence[Point]) -> dict[str, list[str]]:
    """Values of every key that differs between runs; an empty text if a run has none."""
    flat = [point.settings for point in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    columns = {key: [settings.get(key, "") for settings in flat] for key in keys}
    return {
        key: [redact_override(f"{key}={value}").partition("=")[2] if value else "" for value in column]
        for key, column in columns.items()
        if len(set(column)) > 1
    }


def _shades(
    runs: Sequence[Point], column: Sequence[float], minimize: bool, front: Sequence[Point]
) -> list[float | None]:
    """Shade of each run: 1 for the best (with two metrics, the front), 0 for the worst, None if unmeasured."""
    measured = sorted(
        (index for index, value in enumerate(column) if math.isfinite(value)),
        key=lambda index: column[index],
        reverse=minimize,
    )
    shades: list[float | None] = [None] * len(column)
    for place, index in enumerate(measured):
        shades[index] = round(place / max(1, len(measured) - 1), 3)
    if front:
        shades = [
            None if shade is None else 1.0 if point in front else OTHERS
            for point, shade in zip(runs, shades, strict=True)
        ]
    return shades


def _charts(runs: Sequence[Point], metrics: Sequence[str], shades: Sequence[float | None]) -> list[dict[str, Any]]:
    """A chart of all runs for each metric and the training loss; the best run is drawn last."""
    columns = list(dict.fromkeys([*metrics, "train/loss"]))
    most = max(20, min(MAX_CURVE_POINTS, CURVE_POINTS // (len(columns) * max(1, len(runs)))))
    order = sorted(range(len(runs)), key=lambda index: shades[index] if shades[index] is not None else -1)  # type: ignore[arg-type,return-value]
    curves: dict[str, list[Curve]] = {column: [] for column in columns}
    even: dict[str, list[list[float]]] = {column: [] for column in columns}
    for index in order:
        point = runs[index]
        read = read_columns(RunPaths(Path(point.folder)).metrics, columns) if point.folder else {}
        for column, series in read.items():
            measured = points([step for step, _ in series], [value for _, value in series])
            if measured:
                indices = [*range(0, len(measured) - 1, math.ceil(len(measured) / most)), len(measured) - 1]
                curves[column].append(
                    Curve(f"run {point.number}", [measured[row] for row in indices], index, run=index)
                )
                even[column].append(_average_at(measured, indices))
    measured_columns = [column for column in columns if curves[column]]
    charts = []
    for column in measured_columns:
        wide = column == measured_columns[0] and len(measured_columns) % 2 == 1
        figure = chart(column, curves[column], up=column, wide=wide, most=most + 1, log=True)
        figure["spoken"] = f"{column} of {len(curves[column])} runs over their steps"
        for curve, values in zip(figure["drawn"]["curves"], even[column], strict=True):
            curve["even"] = values
        charts.append(figure)
    return charts


def _average_at(series: Points, indices: Sequence[int]) -> list[float]:
    """Moving average at ``indices``, over 1/50 of the rows on each side and fewer at the ends."""
    sums = [0.0, *accumulate(value for _, value in series)]
    reach = len(series) // 50
    means = []
    for index in indices:
        side = min(reach, index)  # symmetric, because a loss is steep at its ends
        first, end = index - side, min(len(series), index + side + 1)
        means.append(float(f"{(sums[end] - sums[first]) / (end - first):.6g}"))
    return means


def _table(
    runs: Sequence[Point],
    metrics: Sequence[str],
    minimize: Sequence[bool],
    settings: dict[str, list[str]],
    links: Sequence[str],
) -> dict[str, Any]:
    """Columns and rows of the table of trials, a cell with its text, its sort key and its style.

    Args:
        minimize: for each of ``metrics`` whether a lower value is better.
        settings: each overridden key with its value in every run.
        links: address of each run's page.
    """
    why = ["why"] if any(point.reason for point in runs) else []
    columns = ["run", "status", *metrics, *settings, "step", "time", *why]
    best = {
        metric: (min if lower else max)(known)
        for metric, lower in zip(metrics, minimize, strict=True)
        if len(known := [value for point in runs if math.isfinite(value := point.metric(metric))]) > 1
    }
    rows = []
    for index, point in enumerate(runs):
        row = [
            _cell(str(point.number), point.number, "n", links[index]),
            _cell(point.status, point.status, point.status),
        ]
        for metric in metrics:
            value = point.metric(metric)
            style = "n best" if value == best.get(metric) else "n"
            row.append(_cell(numbers.figure(value, 5), value if math.isfinite(value) else "", style))
        for column in settings.values():
            number = _as_number(column[index])
            row.append(
                _cell(
                    column[index] or numbers.MISSING,
                    column[index] if number is None else number,
                    "n" if number is not None else "long",
                )
            )
        seconds = numbers.duration(point.wall_s) if point.wall_s else numbers.MISSING
        row += [
            _cell(f"{point.step:,}" if point.step else numbers.MISSING, point.step or "", "n"),
            _cell(seconds, point.wall_s or "", "n"),
            *(_cell(point.reason[:REASON], point.reason[:REASON], "long") for _ in why),
        ]
        rows.append(row)
    return {"columns": columns, "rows": rows}


def _cell(text: str, sort: str | float, style: str = "", link: str = "") -> dict[str, Any]:
    return {"text": text, "sort": sort, "style": style, "number": None, "link": link}


def _best(store: Store, runs: Sequence[Point]) -> list[dict[str, str]]:
    """The best trials, each with the command that repeats it."""
    if len(store.spec["metrics"]) > 1:
        return []
    trials = rank_trials(runs, store.spec["metrics"][0], store.spec["minimize"][0])[:BEST]
    return [
        {
            "figure": trial.text(),
            "alike": "the noise of the seeds does not separate it from the first" if trial.alike else "",
            "run": f"run {trial.first.number}",
            "settings": " ".join(map(redact_override, trial.first.overrides)),
            "command": repeat_line(store, trial.first),
        }
        for trial in trials
    ]


def _front(store: Store, front: Sequence[Point], metrics: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "run": point.number,
            "figures": [numbers.figure(point.metric(metric)) for metric in metrics],
            "settings": " ".join(map(redact_override, point.overrides)),
            "command": repeat_line(store, point),
        }
        for point in front
    ]


def _importances(runs: Sequence[Point], metric: str, settings: dict[str, list[str]]) -> list[Importance]:
    whole = [index for index, point in enumerate(runs) if math.isfinite(point.metric(metric))]
    column = [runs[index].metric(metric) for index in whole]
    return importances({key: [values[index] for index in whole] for key, values in settings.items()}, column)
