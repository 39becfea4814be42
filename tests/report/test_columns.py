"""Columns and rows of tables on a terminal, and the points of charts."""

from __future__ import annotations

import json
import math
import random
import re
import sys

import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.report.charts import MOST_POINTS, Curve, chart, points, smooth_series, thin_series, x_axes
from mgpu_pipe.report.columns import print_columns, print_rows
from mgpu_pipe.report.numbers import capitalize
from mgpu_pipe.report.overview import overview
from mgpu_pipe.report.run_tables import after_table, differences_table, runs_table
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.metrics_file import MetricsWriter
from tests.report.fake_runs import MakeRun

NAMES = ("state", "step", "loss", "tok/s", "strategy", "age", "size", "tags", "run")
NUMERIC = ("step", "loss", "tok/s", "age", "size")
ROW = ("finished", "123,600", "3.31234", "18.8k", "megatron", "3 d 4 h", "12.40 GiB", "paper,v2", "outputs/" + "a" * 90)


@pytest.fixture(params=[60, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return int(request.param)


def test_a_sweeps_table_breaks_no_number(width: int, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    rates = (0.0284762, 0.00284762, 0.000284762123456)
    runs = [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, lr=rate, overrides=(f"strategy=hsdp_{at}",))
        for at, rate in enumerate(rates)
    ]
    for run in runs:
        run.summary.write_text(json.dumps({**json.loads(run.summary.read_text()), "wall_s": 7384.0}))
    runs_table(runs)
    text = capsys.readouterr().out
    table = text.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= width
    words = text.split()
    assert {f"optimizer.lr={rate}" for rate in rates} <= set(words)
    assert words.count("finished") == 3 and (words.count("2:03:04") == 3 or "not shown" in text)
    for time in re.findall(r"\S*:\S*", table):
        assert time in ("2:03:04", "columns:"), time


def test_a_narrow_table_shows_its_figures_whole_and_names_what_it_leaves_out(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    print_columns(NAMES, [ROW, ROW], NUMERIC, spare=("tags", "size", "age", "tok/s"))
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "outputs/" not in line]
    assert max(map(len, lines)) <= width and text.count(ROW[-1]) == 2, "what is copied stays whole"
    shown = lines[0].split()
    left_out = text.rpartition("not shown at")[2].partition(":")[2].replace(",", " ").split()
    assert {*shown, *left_out} | {"run"} == set(NAMES)
    for name, cell in zip(NAMES[:-1], ROW[:-1], strict=True):
        assert (name in shown) == (cell in text)


def test_a_pipe_gets_every_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_columns(NAMES, [ROW], NUMERIC)
    row = capsys.readouterr().out.splitlines()[1]
    assert all(cell in row for cell in ROW)


def test_names_lose_their_first_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_columns(
        ("tensor", "error"), [("model.layers.10.self_attn.q_proj.weight", "1.2e-05")], ("error",), below=(), width=30
    )
    assert capsys.readouterr().out.splitlines()[1] == "\u2026f_attn.q_proj.weight  1.2e-05"


def test_other_tables_fit(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig()
    config.model.name, config.model.type, config.trainer.max_steps = "llama_small", "llama", 1_234_567
    config.data.global_batch_size, config.optimizer.lr = 4096, 0.000284762
    print_rows(overview(config), "check")
    after_table({"metrics": {"val/perplexity": 284.762}, "data": {"unigram_perplexity": 742.8}, "wall_s": 7384.0})
    differences_table([("optimizer.lr", "0.000284762", "0.00284762"), ("data.paths", "[a]", "[" + "b" * 50 + "]")])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for number in ("0.000284762", "0.00284762", "284.8", "742.8", "1,234,567"):
        assert number in text, number


ROWS = [("data", "a text of more words than fit beside it, and " + "x" * 50), ("run", "\x1b[31mred\nsecond line")]


@pytest.mark.parametrize("width", [24, 40, 80])
def test_what_is_said_is_wrapped_in_a_column_of_its_own(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows(ROWS, "a run")
    title, *lines, last = capsys.readouterr().out.split("\n")[:-1]
    assert (title[:6], len(title), last) == ("a run ", width, "")
    assert {line[:6] for line in lines} == {"data  ", "run   ", " " * 6}
    assert max(map(len, lines)) <= width
    said = [line[6:] for line in lines]
    at = next(number for number, line in enumerate(lines) if line.startswith("run"))
    assert "".join(said[:at]).replace(" ", "") == ROWS[0][1].replace(" ", "")
    assert said[at:] == ["\ufffd[31mred", "second line"]


def test_only_a_terminal_that_can_gets_bold_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for kind, name in (("xterm", "\x1b[1mdata\x1b[0m"), ("dumb", "data")):
        monkeypatch.setenv("TERM", kind)
        print_rows([("data", "text")])
        assert capsys.readouterr().out == f"{name}  text\n"


def noise(length: int) -> list[tuple[float, float]]:
    draw = random.Random(length)
    return [(step, draw.gauss(0, 1)) for step in range(1, length + 1)]


def test_a_thinned_series_keeps_its_ends_and_every_spike() -> None:
    series = noise(100_000)
    spikes = [(777, 50.0), (50_001, -60.0), (99_998, 40.0)]
    for step, value in spikes:
        series[step - 1] = (step, value)
    kept = thin_series(series)
    assert len(kept) <= MOST_POINTS
    assert kept[0] == series[0]
    assert kept[-1] == series[-1]
    assert set(spikes) <= set(kept)
    assert set(kept) <= set(series)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_short_series_is_drawn_whole() -> None:
    for length in (0, 1, 2, 3, MOST_POINTS):
        assert thin_series(noise(length)) == noise(length)
    assert len(thin_series(noise(MOST_POINTS + 1))) <= MOST_POINTS
    assert smooth_series(noise(29)) == noise(29)


def test_smoothing_keeps_a_level_and_a_slope_and_damps_noise() -> None:
    level = [(float(step), 3.0) for step in range(1, 501)]
    assert all(math.isclose(value, 3.0) for _, value in smooth_series(level))
    slope = [(float(step), 0.5 * step) for step in range(1, 501)]
    # the window is centred, so a slope is not shifted; only where it ends is it lopsided
    assert all(math.isclose(value, 0.5 * step) for step, value in smooth_series(slope)[:480])
    even = [value for _, value in smooth_series(noise(5000))]
    assert max(even) - min(even) < 1.5


def test_points_leave_out_what_was_not_measured() -> None:
    assert points([1, 2, 3, 4], [1.0, math.nan, math.inf, 2.0]) == [(1, 1.0), (4, 2.0)]


def test_points_leave_out_what_no_chart_can_hold() -> None:
    assert points([2, 1, 2, 3, 10**400, 4], [1.0, 1.0, 9.0, 1e200, 1.0, 2.0]) == [(2, 1.0), (4, 2.0)]


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


def test_a_title_begins_with_a_capital_and_keeps_its_others() -> None:
    assert [capitalize(title) for title in ("held-out loss", "NDCG@10", "")] == ["Held-out loss", "NDCG@10", ""]
