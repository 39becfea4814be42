"""What a chart shows, as plain values: ``static/charts.js`` draws it with uPlot, the template writes its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_pipe.report import numbers
from mgpu_pipe.report.series import LARGEST, MOST_POINTS, Points, thinned

COLORS = 8
ALL_POINTS = 60_000
"""Points of a page's charts, so that a comparison of many runs stays small."""
DIGITS = 6
"""Significant ones that a drawn value has."""

Style = Literal["line", "raw", "dots", "level"]


@dataclass(frozen=True)
class Curve:
    """One curve: ``raw`` is drawn faintly, ``dots`` marks each measurement, ``level`` is a line across the chart.

    Attributes:
        keys: what in a legend switches it; it is drawn while one of them is on.
        number: picks its colour and dashes.
        run: whose steps these are.
        legend: what its key is called; empty leaves it out of the legend.
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
        curves: what to draw; those without points are left out.
        up: name of the value axis.
        note: shown after the title.
        from_zero: the value axis begins at 0.
        log: the value axis is logarithmic at first, if all values are positive and far enough apart.
        wide: take the whole width of the page.
        most: points that a curve keeps.

    Returns:
        ``title``, ``note``, ``wide``, ``legend`` and ``spoken`` for the template, ``drawn`` for the script.
    """
    kept = [curve for curve in curves if curve.points]
    values = [value for curve in kept for _, value in curve.points]
    return {
        "title": title,
        "note": note,
        "wide": wide,
        "legend": legend(kept),
        "spoken": _spoken(title, kept),
        "drawn": {
            "up": up,
            "zero": from_zero,
            "log": log and bool(values) and min(values) > 0 and max(values) > 20 * min(values),
            "curves": [_drawn(curve, most) for curve in kept],
        },
    }


def legend(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Keys of the curves that have a name; none where one curve stands for one run."""
    named = [curve for curve in curves if curve.legend]
    if len(named) < 2 and not any(len(curve.keys) > 1 for curve in named):
        return []
    return [
        {"switches": " ".join(curve.keys), "text": curve.legend, "number": curve.number, "style": curve.style}
        for curve in named
    ]


def _drawn(curve: Curve, most: int) -> dict[str, Any]:
    points = thinned(curve.points, most)
    return {
        "label": curve.label,
        "number": curve.number,
        "style": curve.style,
        "keys": curve.keys,
        "run": curve.run,
        "x": [step for step, _ in points],
        "y": [rounded(value) for _, value in points],
    }


def rounded(value: float) -> float:
    """As drawn; what is next to nothing is nothing, or ticks would lie closer than floats do."""
    return 0.0 if abs(value) < 1 / LARGEST else float(f"{value:.{DIGITS}g}")


def _spoken(title: str, curves: Sequence[Curve]) -> str:
    """The chart in words, for who cannot see it."""
    parts = [
        f"{curve.label}: {numbers.figure(curve.points[0][1])} at step {curve.points[0][0]:,.0f}, "
        f"{numbers.figure(curve.points[-1][1])} at step {curve.points[-1][0]:,.0f}"
        for curve in curves
        if curve.style not in ("raw", "level")
    ]
    return f"{title}. {'; '.join(parts)}"
