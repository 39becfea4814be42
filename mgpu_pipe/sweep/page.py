"""A sweep's report: one page of its runs, made from its store and the runs' metrics files.

The pictures' axes are worked out here, as places between 0 and 1; ``report/static/sweep.js`` draws them.
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
from mgpu_pipe.report.html import document, link, write_page
from mgpu_pipe.report.plots import Curve, chart
from mgpu_pipe.report.redact import override as redacted
from mgpu_pipe.report.series import Points, points
from mgpu_pipe.report.watch import RunsPage, Served, digest, stamps
from mgpu_pipe.runs.metrics_file import read_columns
from mgpu_pipe.sweep.best import pareto, ranked, repeat_line
from mgpu_pipe.sweep.importance import Importance, importances
from mgpu_pipe.sweep.point import FINISHED, GOES_ON, RUNNING, Point
from mgpu_pipe.sweep.store import PAGE, Store

BEST = 5
"""Trials whose command is shown."""
MANY = 12
"""More runs than this have a table that scrolls in a box of its own."""
CURVE_POINTS = 100_000
"""Of all charts together."""
MOST_POINTS = 400
"""Of a run's curve."""
TICKS = 5
OTHERS = 0.4
"""How strongly the runs are drawn that are not on the front of two metrics."""
REASON = 120
"""Characters of why a run ended badly."""
LOG_FROM = 20
"""An axis is logarithmic where its largest value is so many times its smallest one."""


def write_sweep_page(store: Store) -> Path:
    """Write the page into the sweep's folder, and return its path.

    Raises:
        RunFolderError: it cannot be written.
    """
    out = store.folder / PAGE
    found = store.points()
    links = [link(RunPaths(Path(point.folder)).report, out) if point.folder else "" for point in found]
    return write_page(sweep_page(store, found, links), out)


def sweep_page(store: Store, found: Sequence[Point], links: Sequence[str], watched: str = "") -> str:
    """The page's text.

    Args:
        links: where each run's own report lies; empty where it has none.
        watched: see :func:`mgpu_pipe.report.html.render`.
    """
    metrics, minimize = list(store.asked["metrics"]), list(store.asked["minimize"])
    values = {metric: [point.metric(metric) for point in found] for metric in metrics}
    settings = _settings(found)
    front = pareto(found, metrics, minimize) if len(metrics) == 2 else []
    shades = _shades(found, values[metrics[0]], minimize[0], front)
    charts = _charts(found, metrics, shades)
    axes = [axis(key, column) for key, column in settings.items()]
    axes += [axis(metric, column) for metric, column in values.items()]
    at = {key: number for number, key in enumerate([*settings, *metrics])}
    counted = Counter(point.status for point in found)
    going = [status for status in (RUNNING, *GOES_ON) if counted[status]]
    return document(
        "sweep.html",
        ["charts.js", "sweep.js"],
        title=f"{store.name} · sweep",
        heading=store.name,
        status=RUNNING if counted[RUNNING] else "unfinished" if going else FINISHED,
        subtitle=[
            repeat_line(store),
            f"{len(found)} runs: " + ", ".join(f"{count} {status}" for status, count in counted.most_common()),
            "ranked by "
            + " and ".join(
                f"{name}, {'lower' if lower else 'higher'} is better"
                for name, lower in zip(metrics, minimize, strict=True)
            ),
        ],
        best=_best(store, found),
        front=_front(store, front, metrics),
        tradeoff=[at[metric] for metric in metrics] if len(metrics) == 2 else None,
        table=_table(found, metrics, minimize, settings, links),
        across=len(axes),
        against=[{"key": key, "x": at[key], "y": at[metrics[0]]} for key in settings],
        importances=_importances(found, metrics[0], settings),
        metric=metrics[0],
        charts=charts,
        data={
            "axes": ["step"],
            "clocks": [],
            "charts": [one["drawn"] for one in charts],
            "pictures": axes,
            "runs": [point.number for point in found],
            "shades": shades,
            "front": [found.index(point) for point in front],
        },
        many=len(found) > MANY,
        watched=watched,
        footer=f"Written by mgpu_pipe {__version__} from {store.folder} at {time.strftime('%Y-%m-%d %H:%M:%S')}",
    )


class SweepPage:
    """The page of a sweep that goes on, for ``sweeps report --watch``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tag(self) -> str:
        found = self._store.points()
        return digest([(point, stamps([RunPaths(Path(point.folder)).metrics])) for point in found])

    def text(self, tag: str) -> str:
        found = self._store.points()
        return sweep_page(self._store, found, [f"/{point.number}" if point.folder else "" for point in found], tag)

    def find(self, path: str) -> Served | None:
        """``/`` is this page, ``/1``, ``/2`` ... the reports of its runs."""
        folders = {f"/{point.number}": point.folder for point in self._store.points() if point.folder}
        return self if path == "/" else RunsPage([RunPaths(Path(folders[path]))]) if path in folders else None


def axis(name: str, column: Sequence[str | float]) -> dict[str, Any]:
    """A picture's axis.

    Args:
        column: each run's value; an empty text or NaN where it has none.

    Returns:
        ``name``; ``ticks``, pairs of a text and its place from 0 to 1; ``places``, each run's or None.
    """
    known = [_as_number(value) for value in column if value not in ("", None)]
    if any(value is None for value in known):
        words = sorted({str(value) for value in column if value != ""})
        place = {word: (at + 0.5) / len(words) for at, word in enumerate(words)}
        return {"name": name, "ticks": list(place.items()), "places": [place.get(str(value)) for value in column]}
    given = [_as_number(value) for value in column]
    finite = sorted({value for value in given if value is not None and math.isfinite(value)})
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

    shown = finite
    places = [place_of(value) or 0.0 for value in finite]
    if len(finite) > TICKS + 1 or any(right - left < 0.1 for left, right in pairwise(places)):
        shares = [at / (TICKS - 1) for at in range(TICKS)]
        shown = [low * (high / low) ** share if log else low + (high - low) * share for share in shares]
        decades = (
            [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
            if log
            else []
        )
        if len(decades) > 1:
            shown = decades[:: math.ceil(len(decades) / TICKS)]
    ticks = [(numbers.figure(value, 3), place_of(value)) for value in shown]
    return {"name": name, "ticks": ticks, "places": [place_of(value) for value in given]}


def _as_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _settings(found: Sequence[Point]) -> dict[str, list[str]]:
    """The values of every key that is not the same in all runs; an empty text where a run has none."""
    flat = [point.settings for point in found]
    keys = dict.fromkeys(key for one in flat for key in one)
    columns = {key: [one.get(key, "") for one in flat] for key in keys}
    return {
        key: [redacted(f"{key}={value}").partition("=")[2] if value else "" for value in column]
        for key, column in columns.items()
        if len(set(column)) > 1
    }


def _shades(
    found: Sequence[Point], column: Sequence[float], minimize: bool, front: Sequence[Point]
) -> list[float | None]:
    """How strongly each run is drawn: 1 for the best (of two metrics the front), 0 for the worst, None unmeasured."""
    measured = sorted(
        (at for at, value in enumerate(column) if math.isfinite(value)), key=lambda at: column[at], reverse=minimize
    )
    shades: list[float | None] = [None] * len(column)
    for place, at in enumerate(measured):
        shades[at] = round(place / max(1, len(measured) - 1), 3)
    if front:
        shades = [
            None if shade is None else 1.0 if point in front else OTHERS
            for point, shade in zip(found, shades, strict=True)
        ]
    return shades


def _charts(found: Sequence[Point], metrics: Sequence[str], shades: Sequence[float | None]) -> list[dict[str, Any]]:
    """The curves of the metrics and of the training loss, of all runs in one chart; the best is drawn last."""
    columns = list(dict.fromkeys([*metrics, "train/loss"]))
    most = max(20, min(MOST_POINTS, CURVE_POINTS // (len(columns) * max(1, len(found)))))
    order = sorted(range(len(found)), key=lambda at: shades[at] if shades[at] is not None else -1)  # type: ignore[arg-type,return-value]
    curves: dict[str, list[Curve]] = {column: [] for column in columns}
    even: dict[str, list[list[float]]] = {column: [] for column in columns}
    for at in order:
        point = found[at]
        read = read_columns(RunPaths(Path(point.folder)).metrics, columns) if point.folder else {}
        for column, series in read.items():
            measured = points([step for step, _ in series], [value for _, value in series])
            if measured:
                kept = [*range(0, len(measured) - 1, math.ceil(len(measured) / most)), len(measured) - 1]
                curves[column].append(Curve(f"run {point.number}", [measured[one] for one in kept], at, run=at))
                even[column].append(_even(measured, kept))
    shown = [column for column in columns if curves[column]]
    drawn = []
    for column in shown:
        wide = column == shown[0] and len(shown) % 2 == 1
        made = chart(column, curves[column], up=column, wide=wide, most=most + 1, log=True)
        made["spoken"] = f"{column} of {len(curves[column])} runs over their steps"
        for curve, values in zip(made["drawn"]["curves"], even[column], strict=True):
            curve["even"] = values
        drawn.append(made)
    return drawn


def _even(series: Points, kept: Sequence[int]) -> list[float]:
    """At each of these places the mean of the rows around it: a fiftieth of all on each side, fewer at the ends."""
    sums = [0.0, *accumulate(value for _, value in series)]
    reach = len(series) // 50
    means = []
    for at in kept:
        side = min(reach, at)  # as many on both sides, where a loss is steep
        first, end = at - side, min(len(series), at + side + 1)
        means.append(float(f"{(sums[end] - sums[first]) / (end - first):.6g}"))
    return means


def _table(
    found: Sequence[Point],
    metrics: Sequence[str],
    minimize: Sequence[bool],
    settings: dict[str, list[str]],
    links: Sequence[str],
) -> dict[str, Any]:
    why = ["why"] if any(point.reason for point in found) else []
    columns = ["run", "status", *metrics, *settings, "step", "time", *why]
    best = {
        metric: (min if lower else max)(known)
        for metric, lower in zip(metrics, minimize, strict=True)
        if len(known := [value for point in found if math.isfinite(value := point.metric(metric))]) > 1
    }
    rows = []
    for at, point in enumerate(found):
        row = [_cell(str(point.number), point.number, "n", links[at]), _cell(point.status, point.status, point.status)]
        for metric in metrics:
            value = point.metric(metric)
            style = "n best" if value == best.get(metric) else "n"
            row.append(_cell(numbers.figure(value, 5), value if math.isfinite(value) else "", style))
        for column in settings.values():
            number = _as_number(column[at])
            row.append(
                _cell(
                    column[at] or numbers.MISSING,
                    column[at] if number is None else number,
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


def _best(store: Store, found: Sequence[Point]) -> list[dict[str, str]]:
    """The best trials, the noise of their seeds in view, each with the command that repeats it."""
    if len(store.asked["metrics"]) > 1:
        return []
    trials = ranked(found, store.asked["metrics"][0], store.asked["minimize"][0])[:BEST]
    return [
        {
            "figure": trial.told(),
            "alike": "the noise of the seeds does not tell it from the first" if trial.alike else "",
            "run": f"run {trial.first.number}",
            "settings": " ".join(map(redacted, trial.first.overrides)),
            "command": repeat_line(store, trial.first),
        }
        for trial in trials
    ]


def _front(store: Store, front: Sequence[Point], metrics: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "run": point.number,
            "figures": [numbers.figure(point.metric(metric)) for metric in metrics],
            "settings": " ".join(map(redacted, point.overrides)),
            "command": repeat_line(store, point),
        }
        for point in front
    ]


def _importances(found: Sequence[Point], metric: str, settings: dict[str, list[str]]) -> list[Importance]:
    whole = [at for at, point in enumerate(found) if math.isfinite(point.metric(metric))]
    column = [found[at].metric(metric) for at in whole]
    return importances({key: [values[at] for at in whole] for key, values in settings.items()}, column)
