"""What is drawn still shows what was measured. Oracles: the extremes and means of the whole series."""

from __future__ import annotations

import math
import random

from mgpu_pipe.report.charts import MOST_POINTS, points, smoothed, thinned


def noise(length: int) -> list[tuple[float, float]]:
    draw = random.Random(length)
    return [(step, draw.gauss(0, 1)) for step in range(1, length + 1)]


def test_a_thinned_series_keeps_its_ends_and_every_spike() -> None:
    series = noise(100_000)
    spikes = [(777, 50.0), (50_001, -60.0), (99_998, 40.0)]
    for step, value in spikes:
        series[step - 1] = (step, value)
    kept = thinned(series)
    assert len(kept) <= MOST_POINTS
    assert kept[0] == series[0]
    assert kept[-1] == series[-1]
    assert set(spikes) <= set(kept)
    assert set(kept) <= set(series)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_short_series_is_drawn_whole() -> None:
    for length in (0, 1, 2, 3, MOST_POINTS):
        assert thinned(noise(length)) == noise(length)
    assert len(thinned(noise(MOST_POINTS + 1))) <= MOST_POINTS
    assert smoothed(noise(29)) == noise(29)


def test_smoothing_keeps_a_level_and_a_slope_and_damps_noise() -> None:
    level = [(float(step), 3.0) for step in range(1, 501)]
    assert all(math.isclose(value, 3.0) for _, value in smoothed(level))
    slope = [(float(step), 0.5 * step) for step in range(1, 501)]
    # the window is centred, so a slope is not shifted; only where it ends is it lopsided
    assert all(math.isclose(value, 0.5 * step) for step, value in smoothed(slope)[:480])
    even = [value for _, value in smoothed(noise(5000))]
    assert max(even) - min(even) < 1.5


def test_points_leave_out_what_was_not_measured() -> None:
    assert points([1, 2, 3, 4], [1.0, math.nan, math.inf, 2.0]) == [(1, 1.0), (4, 2.0)]


def test_points_leave_out_what_no_chart_can_hold() -> None:
    assert points([2, 1, 2, 3, 10**400, 4], [1.0, 1.0, 9.0, 1e200, 1.0, 2.0]) == [(2, 1.0), (4, 2.0)]
