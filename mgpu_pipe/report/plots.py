"""Line charts as HTML with inline SVG, without a plotting library.

The SVG holds the curves alone and is stretched to the width there is, strokes keeping their width; the axes' texts are
HTML placed by percentages, so they stay as large on a phone as on a desk. Colours are CSS variables, so that light
and dark are the reader's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from mgpu_pipe.report import numbers
from mgpu_pipe.report.series import Points, thinned

BOX = 10_000
"""Units of the drawing on each side; coordinates are whole numbers."""
COLORS = 8

Style = Literal["line", "raw", "dots"]


@dataclass(frozen=True)
class Curve:
    """One curve: ``raw`` is drawn faintly, ``dots`` marks each measurement; an empty ``legend`` leaves it out there."""

    label: str
    points: Points
    color: int
    style: Style = "line"
    legend: str = ""


@dataclass(frozen=True)
class Axis:
    """A range of values and where on it a value lies, from 0 to 1."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high, about)


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    from_zero: bool = False,
    log: bool = False,
    reference: tuple[str, float] | None = None,
    wide: bool = False,
) -> Markup:
    """A ``<figure>`` of curves over steps.

    Args:
        title: heading of the chart.
        curves: what to draw; those without points are left out.
        unit: shown after the title.
        from_zero: the value axis begins at 0.
        log: the value axis is logarithmic, if all values are positive and far enough apart.
        reference: label and value of a level line, drawn if it is in range.
        wide: take the whole width of the page.
    """
    drawn = [curve for curve in curves if curve.points]
    head = Markup('<figcaption><span class="title">{}</span>{}{}</figcaption>').format(
        title, Markup('<span class="unit">{}</span>').format(unit) if unit else "", _legend(drawn)
    )
    classes = "chart wide" if wide else "chart"
    if not drawn:
        empty = Markup('<div class="empty">nothing measured yet</div>')
        return Markup('<figure class="{}">{}{}</figure>').format(classes, head, empty)
    across, up = _axes(drawn, from_zero, log)
    level = _reference(reference, up)
    lines = [_grid(across, up, 6 if wide else 5), *(_draw(curve, across, up) for curve in drawn)]
    svg = Markup('<svg viewBox="0 0 {0} {0}" preserveAspectRatio="none" role="img" aria-label="{1}">{2}</svg>').format(
        BOX, _spoken(title, drawn), Markup("").join(lines)
    )
    plot = Markup(
        '<div class="plot" data-x="{} {}" data-y="{!r} {!r}" data-log="{}">{}{}'
        '<div class="cursor"></div><div class="tip"></div></div>'
    ).format(across.low, across.high, up.low, up.high, int(up.log), svg, level)
    frame = Markup('<div class="frame"><div class="y">{}</div>{}<div class="x">{}</div></div>').format(
        _labels(up, "bottom", 5), plot, _labels(across, "left", 6 if wide else 5)
    )
    return Markup('<figure class="{}">{}{}</figure>').format(classes, head, frame)


def _axes(curves: Sequence[Curve], from_zero: bool, log: bool) -> tuple[Axis, Axis]:
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    first, last = min(steps), max(steps)
    first = 0 if first <= 0.05 * last else first
    across = Axis(first, last if last > first else first + 1)
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 20:
        return across, Axis(low / 1.1, high * 1.1, log=True)
    if from_zero and low >= 0:
        return across, Axis(0.0, high * 1.08 or 1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return across, Axis(low - margin, high + margin)


def _draw(curve: Curve, across: Axis, up: Axis) -> Markup:
    placed = [(round(across.at(step) * BOX), round((1 - up.at(value)) * BOX)) for step, value in thinned(curve.points)]
    color, dash = curve.color % COLORS, curve.color // COLORS
    classes = f"k{color} {curve.style}" + (f" dash{dash % 3}" if dash else "")
    line = Markup('<polyline class="{}" data-label="{}" points="{}"/>').format(
        classes, curve.label, " ".join(f"{x},{y}" for x, y in placed)
    )
    if curve.style != "dots" and len(placed) > 1:
        return line
    return line + Markup('<path class="k{} mark" d="{}"/>').format(color, "".join(f"M{x} {y}h0" for x, y in placed))


def _grid(across: Axis, up: Axis, columns_about: int) -> Markup:
    rows = "".join(f"M0 {round((1 - up.at(tick)) * BOX)}H{BOX}" for tick in up.ticks(5))
    columns = "".join(f"M{round(across.at(tick) * BOX)} 0V{BOX}" for tick in across.ticks(columns_about))
    return Markup('<path class="grid" d="{}"/>').format(rows + columns)


def _labels(axis: Axis, side: str, about: int) -> Markup:
    ticks = axis.ticks(about)
    return Markup("").join(
        Markup('<span style="{}:{:.2f}%">{}</span>').format(side, axis.at(tick) * 100, _tick(tick, ticks))
        for tick in ticks
    )


def _reference(reference: tuple[str, float] | None, up: Axis) -> Markup:
    if reference is None or not up.low < reference[1] < up.high:
        return Markup("")
    return Markup('<div class="level" style="bottom:{:.2f}%"><span>{}</span></div>').format(
        up.at(reference[1]) * 100, reference[0]
    )


def _legend(curves: Sequence[Curve]) -> Markup:
    named = [curve for curve in curves if curve.legend]
    if len(named) < 2:
        return Markup("")
    keys = Markup("").join(
        Markup('<span class="key"><i class="swatch k{} {}"></i>{}</span>').format(
            curve.color % COLORS, curve.style, curve.legend
        )
        for curve in named
    )
    return Markup('<span class="legend">{}</span>').format(keys)


def _spoken(title: str, curves: Sequence[Curve]) -> Markup:
    """The chart in words, for who cannot see it."""
    parts = [
        f"{curve.label}: {numbers.figure(curve.points[0][1])} at step {curve.points[0][0]:,.0f}, "
        f"{numbers.figure(curve.points[-1][1])} at step {curve.points[-1][0]:,.0f}"
        for curve in curves
        if curve.style != "raw"
    ]
    return escape(f"{title}. {'; '.join(parts)}")


def _linear_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.99)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [position * step for position in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    spread = math.log10(high / low)
    factors = (1, 2, 5) if spread < 3 else (1,)
    every = max(1, round(spread / 6))
    return [
        factor * 10.0**power
        for power in powers
        for factor in factors
        if low <= factor * 10.0**power <= high and power % every == 0
    ]


def _tick(value: float, ticks: Sequence[float]) -> str:
    """A label just precise enough to tell the ticks apart."""
    if value == 0:
        return "0"
    largest = max(abs(tick) for tick in ticks)
    if largest >= 10_000:
        return numbers.count(value)
    if largest < 0.001:
        return numbers.figure(value, 3)
    return f"{round(value, 10):,.10f}".rstrip("0").rstrip(".")
