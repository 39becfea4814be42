"""The sweep's page, also in a browser. Oracles: the store's own figures, textbook statistics."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.report.watch import ReportServer
from mgpu_pipe.runs.metrics_file import read_columns, read_metrics
from mgpu_pipe.sweep.best import importances
from mgpu_pipe.sweep.page import SweepPage, axis, write_sweep_page
from mgpu_pipe.sweep.point import DIVERGED, WAITING
from mgpu_pipe.sweep.store import Store
from tests.report.browser import Browser, program
from tests.sweep.support import recorded_sweep

NEEDS_BROWSER = pytest.mark.skipif(program() is None, reason="a browser shows the page: apt-get install chromium")
SHOWN = (
    "[...document.querySelectorAll('.runs tbody tr')].filter(row => !row.hidden).map(row => +row.cells[0].dataset.sort)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Store:
    """Twenty runs, of which the fourth diverged and the fifth waits."""
    store = recorded_sweep(tmp_path, 20, 60)
    for point, status, reason in zip(store.points()[3:5], (DIVERGED, WAITING), ("not finite", ""), strict=True):
        store.change(point, status=status, reason=reason, metrics={})
    return store


def type_filter(browser: Browser, text: str) -> list[int]:
    browser.run(f"filter.value = {json.dumps(text)}")
    browser.run("filter.dispatchEvent(new Event('input', {bubbles: true}))")
    return browser.run(SHOWN)


@NEEDS_BROWSER
def test_the_table_sorts_and_filters_and_all_pictures_follow(browser: Browser, sweep: Store) -> None:
    browser.open(write_sweep_page(sweep).as_uri())
    points = sweep.points()
    for way in (1, -1):
        browser.click(".runs th:nth-child(3) button")
        measured = [point for point in points if not math.isnan(point.metric("val/loss"))]
        order = [p.number for p in sorted(measured, key=lambda p: way * p.metric("val/loss"))]
        assert browser.run(SHOWN) == [*order, 4, 5], "what reached nothing comes last either way"
    rate = {point.number: float(point.settings["optimizer.lr"]) for point in points}
    cases = {
        "diverged": {4},
        "optimizer.lr>=1e-3": {number for number in rate if rate[number] >= 1e-3},
        "lr<1e-3 scheduler=wsd": {number for number in rate if rate[number] < 1e-3 and number > 10},
        "lr=1e-3": {5, 15},
        "nothing": set(),
    }
    shown = "plots[0].u.series.slice(1).flatMap((one, at) => one.show ? [page.runs[plots[0].curves[at].run]] : [])"
    for text, wanted in cases.items():
        assert set(type_filter(browser, text)) == wanted
        assert set(browser.run(shown)) == wanted, "the curves"
        first, *others = browser.run("all('canvas.picture').map(one => one.at.map(([run]) => page.runs[run]))")
        assert set(first) == wanted and all(set(other) == wanted - {4, 5} for other in others)
    assert "20 runs" in browser.run("document.getElementById('match-count').textContent")
    type_filter(browser, "")
    assert len(browser.run(SHOWN)) == 20 and browser.refused == []


@NEEDS_BROWSER
def test_the_switch_smooths_the_curves_and_the_pointer_names_a_run(browser: Browser, sweep: Store) -> None:
    browser.open(write_sweep_page(sweep).as_uri())
    curve = next(one for one in browser.run("page.charts[1].curves") if one["label"] == "run 15")
    truth = read_metrics(Path(sweep.points()[14].folder) / "metrics.csv")["train/loss"]
    assert curve["y"] == [float(f"{loss:.6g}") for loss in truth]
    assert curve["even"][30] == pytest.approx(sum(truth[29:32]) / 3, rel=1e-5)
    drawn = "plots[1].curves.find(one => one.label === 'run 15').y"
    assert browser.run(drawn) == curve["even"]
    browser.click("#even")
    assert browser.run(drawn) == curve["y"]
    x, y = browser.run(
        "(c => { c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect();"
        " const [, [[x, y]]] = c.at.find(([run]) => page.runs[run] === 8); return [b.x + x, b.y + y]; })"
        "(document.querySelectorAll('.against canvas')[0])"
    )
    browser.mouse("mouseMoved", x, y)
    told = browser.run("document.querySelector('main > .tip').innerText").split("\n")
    assert told[told.index("run") + 1] in ("8", "18") and "val/loss" in told


@NEEDS_BROWSER
@pytest.mark.parametrize("metrics", [["val/loss"], ["val/loss", "train/loss"]])
def test_it_fits_its_window_and_nothing_is_refused(browser: Browser, tmp_path: Path, metrics: list[str]) -> None:
    page = write_sweep_page(recorded_sweep(tmp_path, 20, 30, metrics=metrics, minimize=[True, False][: len(metrics)]))
    for width in (1400, 390):
        for dark in (False, True):
            browser.open(page.as_uri(), width, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") == width
            browser.wait("all('canvas.picture').every(one => one.at?.length === 20)")  # drawn in a later frame
            assert browser.refused == []


@pytest.mark.slow
@NEEDS_BROWSER
def test_a_served_page_follows_the_sweep_and_keeps_what_the_reader_chose(browser: Browser, sweep: Store) -> None:
    with ReportServer(SweepPage(sweep).find, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        browser.open(server.address)
        assert type_filter(browser, "waiting") == [5]
        sweep.change(sweep.points()[4], status="finished", metrics={"val/loss": 9.5})
        browser.wait("document.querySelector('.runs tbody tr:nth-child(5)').textContent.includes('finished')")
        assert browser.run(SHOWN) == [] and browser.run("filter.value") == "waiting"
        server.shutdown()


def test_the_best_runs_come_with_the_command_that_repeats_them(
    sweep: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweeps", "report", "mine", f"run.root={tmp_path}"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == sweep.folder / "report.html"
    text = page.read_text()
    assert not re.search(r"""(src|href)=["'](?!\./)""", text) and "default-src 'none'" in text, "it needs no network"
    commands = re.findall(r"<pre><code>(.*?)</code></pre>", text)
    finished = [point for point in sweep.points() if point.metrics]
    best = sorted(finished, key=lambda point: (point.metric("val/loss"), point.number))[:5]
    assert commands == [f"mgpu-pipe {' '.join(point.overrides)}" for point in best]


def test_two_metrics_have_a_front(tmp_path: Path) -> None:
    store = recorded_sweep(tmp_path, 4, 3, metrics=["speed", "memory"], minimize=[False, True])
    for point, (speed, memory) in zip(store.points(), [(10, 1), (20, 2), (15, 2.5), (5, 9)], strict=True):
        store.change(point, metrics={"speed": speed, "memory": memory})
    page = write_sweep_page(store).read_text()
    table = page.split('id="front"')[1].split("</table>")[0]
    assert re.findall(r"<tr><td>(\d)</td>", table) == ["2", "1"] and table.count("mgpu-pipe optimizer.lr") == 2
    assert "data-front" in page


def test_an_axis_places_numbers_by_their_scale_and_words_side_by_side() -> None:
    even = axis("x", ["1", "3", "", "2"])
    assert even["places"] == [0, 1, None, 0.5] and even["ticks"] == [("1", 0.0), ("2", 0.5), ("3", 1.0)]
    log = axis("x", [1e-4, 1e-2, 1e-3, math.nan])
    assert log["places"] == [0, 1, 0.5, None]
    words = axis("x", ["wsd", "cosine", ""])
    assert words["places"] == [0.75, 0.25, None] and [text for text, _ in words["ticks"]] == ["cosine", "wsd"]
    assert axis("x", [math.nan, math.inf])["places"] == [None, None] and axis("x", ["7"])["places"] == [0.5]


def test_importance_is_the_share_of_the_variance_between_bins() -> None:
    metric = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = {one.key: one for one in importances({"a": ["x", "x", "x", "y", "y", "y"], "b": ["1", "2"] * 3}, metric)}
    # ranks 1..6: within {1,2,3} and {4,5,6} squares of 2 each over 4 degrees; whole variance 3.5
    assert found["a"].share == pytest.approx(1 - (4 / 4) / 3.5) and math.isnan(found["a"].trend)
    assert found["b"].share == 0 and found["b"].trend == pytest.approx(0.2927700218845599)
    assert importances({"a": ["1"] * 5}, metric[:5]) == []
    (word,) = importances({"a": ["nan", "nan", "nan", "1", "1", "1"]}, metric)
    assert word.share == found["a"].share, "a value without a place in an order is a word"
    many = importances({"c": [str(at) for at in range(50)]}, [float(at * at) for at in range(50)])[0]
    assert many.trend == pytest.approx(1) and 0.9 < many.share < 1


def test_columns_are_read_as_the_table_is(tmp_path: Path) -> None:
    path = Path(recorded_sweep(tmp_path, 1, 12).points()[0].folder) / "metrics.csv"
    path.write_text(path.read_text() + "13,nan,,,,,,,,,,\nx,1,,,,,,,,,,\n14,1,2\n15,inf,,,,,,,,,3.5,\n16,2")
    table = read_metrics(path)
    for name in ("train/loss", "val/loss", "other"):
        truth = zip(table["step"], table.get(name, []), strict=False)
        assert read_columns(path, [name]) == {name: [(step, value) for step, value in truth if math.isfinite(value)]}
    assert read_columns(tmp_path / "none.csv", ["lr"]) == {"lr": []}
