"""What the charts are given. Oracles: the numbers put in, sums by hand."""

from __future__ import annotations

import pytest

from mgpu_pipe.report.charts import Curve, chart, x_axes
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.metrics_file import MetricsWriter
from tests.report.fake_runs import MakeRun


def test_a_chart_holds_steps_and_values_as_they_were_measured() -> None:
    drawn = chart("t", [Curve("a", [(1, 0.5), (50, 1 / 3)], 2, keys=("k",), run=1)], up="nats")["drawn"]
    assert drawn["up"] == "nats"
    assert drawn["curves"] == [
        {"label": "a", "number": 2, "style": "line", "keys": ("k",), "run": 1, "x": [1, 50], "y": [0.5, 0.333333]}
    ]


@pytest.mark.parametrize(("values", "log"), [([0.01, 2.0], True), ([1.0, 2.0], False), ([-1.0, 100.0], False)])
def test_a_logarithmic_axis_is_for_positive_values_far_apart(values: list[float], log: bool) -> None:
    assert chart("t", [Curve("a", list(enumerate(values)), 0)], log=True)["drawn"]["log"] is log


def test_what_was_not_measured_is_not_drawn() -> None:
    assert chart("t", [Curve("a", [], 0, legend="a"), Curve("b", [], 0, legend="b")])["drawn"]["curves"] == []


def test_a_legend_is_there_where_there_is_something_to_tell_apart() -> None:
    line = [(1.0, 1.0)]
    one, two = Curve("a", line, 0, keys=("a",), legend="a"), Curve("b", line, 1, "dots", ("b", "c"), legend="b = c")
    assert chart("t", [one])["legend"] == []
    assert [key["text"] for key in chart("t", [two])["legend"]] == ["b = c"]
    assert [key["switches"] for key in chart("t", [one, two])["legend"]] == ["a", "b c"]


def test_a_chart_is_told_in_words() -> None:
    curves = [Curve("train", [(1, 8.0), (1000, 4.25)], 0), Curve("each step", [(1, 1.0)], 0, "raw")]
    assert chart("Loss", curves)["spoken"] == "Loss. train: 8 at step 1, 4.25 at step 1,000"


def test_tokens_and_time_add_up_also_over_steps_that_were_not_logged(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    run.metrics.unlink()
    writer = MetricsWriter(run.metrics)
    for step in (1, 10, 20):
        row = {"step": step, "train/loss": 1.0, "throughput/tokens_per_s": 100.0, "throughput/step_s": float(step)}
        writer.append(row)
    writer.close()
    view = load_run(run)
    assert x_axes([view]) == {
        "axes": ["step", "tokens", "training time, s"],
        "clocks": [[[0, 1, 10, 20], [0, 100, 9100, 29_100], [0, 1, 91, 291]]],
    }
    view.metrics.pop("throughput/step_s")
    assert x_axes([view]) == {"axes": ["step"], "clocks": [[[1, 10, 20]]]}
