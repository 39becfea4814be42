"""Charts place values where they belong. Oracles: the straight line between two corners, rounding by hand."""

from __future__ import annotations

import re

import pytest

from mgpu_pipe.report.plots import Axis, Curve, chart


def drawn(markup: str) -> list[tuple[int, int]]:
    return [
        (int(pair.split(",")[0]), int(pair.split(",")[1]))
        for pair in re.search(r'points="([^"]+)"', markup)[1].split()  # type: ignore[index]
    ]


def test_points_lie_at_their_share_of_the_axes() -> None:
    markup = chart("t", [Curve("a", [(0, 0.0), (50, 5.0), (100, 10.0)], 0)], from_zero=True)
    (left, bottom), (middle_x, middle_y), (right, top) = drawn(markup)
    assert (left, middle_x, right) == (0, 5000, 10_000)
    assert bottom == 10_000
    assert top == pytest.approx(10_000 * 0.08 / 1.08, abs=1)
    assert middle_y == pytest.approx((bottom + top) / 2, abs=1)


def test_a_logarithmic_axis_places_factors_equally_far_apart() -> None:
    markup = chart("t", [Curve("a", [(0, 0.01), (1, 1.0), (2, 100.0)], 0)], log=True)
    heights = [y for _, y in drawn(markup)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=1)
    assert 'data-log="1"' in markup
    assert 'data-log="0"' in chart("t", [Curve("a", [(0, -1.0), (1, 1.0)], 0)], log=True)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 600, [0, 200, 400, 600]),
        (3.1, 8.6, [4, 6, 8]),
        (0, 0.003, [0, 0.001, 0.002, 0.003]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, expected: list[float]) -> None:
    assert Axis(low, high).ticks(5) == pytest.approx(expected)


def test_a_single_measurement_is_a_visible_mark() -> None:
    markup = chart("t", [Curve("a", [(7, 2.0)], 0)])
    assert re.search(r'class="k0 mark" d="M\d+ \d+h0"', markup)


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0, 5.0], [-3.0, -3.0], [1e-300, 1e-300], [1e30, 1e30], [1e6, 2e9]])
def test_level_and_extreme_series_have_an_axis(values: list[float]) -> None:
    for options in ({}, {"from_zero": True}, {"log": True}):
        markup = chart("t", [Curve("a", list(enumerate(values)), 0)], **options)  # type: ignore[arg-type]
        assert all(0 <= x <= 10_000 and 0 <= y <= 10_000 for x, y in drawn(markup))


def test_no_measurement_says_so() -> None:
    assert "nothing measured yet" in chart("Loss", [Curve("a", [], 0)])


def test_labels_are_escaped() -> None:
    markup = chart("<b>", [Curve('"><script>', [(1, 1.0)], 0, legend="<i>")], unit="<u>", reference=("<s>", 1.0))
    assert not re.search(r"<(b|script|u|s)>", markup)
    assert "&lt;s&gt;" in markup
    assert "<i>" not in markup


def test_the_reference_line_is_drawn_only_where_it_is_in_range() -> None:
    curve = Curve("a", [(1, 8.0), (2, 4.0)], 0)
    assert "baseline" in chart("t", [curve], reference=("baseline", 6.0))
    assert "baseline" not in chart("t", [curve], reference=("baseline", 60.0))
