"""The page in a browser: zoom, legend, axes, keys, refresh. Oracle: the figures of the run's own files."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.report.html import write_report
from mgpu_pipe.report.watch import ReportServer, pages_of
from tests.report.browser import Browser, program
from tests.report.fake_runs import MakeRun

pytestmark = pytest.mark.skipif(
    program() is None, reason="no browser drives the report here; install one (apt-get install chromium)"
)
AXES = "plots.map(plot => [plot.u.scales.x.min, plot.u.scales.x.max])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser: Browser, make_run: MakeRun) -> Browser:
    show(browser, make_run(steps=60))
    return browser


def show(browser: Browser, *runs: RunPaths, width: int = 1400, dark: bool = False) -> None:
    browser.open(write_report(list(runs), runs[0].report).as_uri(), width, dark=dark)


def compared(make_run: MakeRun) -> list[RunPaths]:
    return [
        make_run(folder=f"2026-01-01_00-00-0{at}-aaaaaaaa", steps=60, lr=lr, seed=at)
        for at, lr in enumerate([1e-3, 4e-3, 2e-3])
    ]


def place(browser: Browser, chart: int = 0) -> dict[str, float]:
    """Where a chart's area lies in the window."""
    return browser.run(
        f"(e => {{ e.scrollIntoView({{block: 'center'}}); const {{x, y, width, height}} = e.getBoundingClientRect();"
        f" return {{x, y, width, height}}; }})(document.querySelectorAll('.u-over')[{chart}])"
    )


def drag(browser: Browser, start: float, end: float) -> None:
    box = place(browser)
    at, y = (lambda share: box["x"] + share * box["width"]), box["y"] + box["height"] / 2
    browser.mouse("mouseMoved", at(start), y)
    browser.mouse("mousePressed", at(start), y, clickCount=1)
    browser.mouse("mouseMoved", at((start + end) / 2), y, buttons=1)
    browser.mouse("mouseMoved", at(end), y, buttons=1)
    browser.mouse("mouseReleased", at(end), y, clickCount=1)


@pytest.mark.parametrize(("width", "screens"), [(1400, 4), (390, 8)])
def test_many_runs_are_compared_on_a_few_screens_and_nothing_is_lost(
    browser: Browser, make_run: MakeRun, width: int, screens: int
) -> None:
    runs = [make_run(folder=f"2026-01-01_00-00-{at:02}-aaaaaaaa", steps=8, lr=1e-3 + at * 1e-5) for at in range(40)]
    show(browser, *runs, width=width)
    assert browser.run("document.documentElement.scrollHeight") < screens * 900
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.querySelectorAll('.runs tbody tr').length") == 40
    assert browser.run("document.querySelectorAll('#configs details').length") == 40
    assert browser.run("document.querySelectorAll('details[open]').length") == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_fits_its_window_and_nothing_is_refused(browser: Browser, make_run: MakeRun, width: int, dark: bool) -> None:
    for runs in ([make_run(steps=60)], compared(make_run)):
        show(browser, *runs, width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.run("plots.length") == 6
        assert browser.refused == [], "neither a script's error nor anything that the policy blocks"


def test_dragging_zooms_every_chart_and_a_double_click_shows_all(opened: Browser) -> None:
    assert opened.run(AXES) == [[0, 60]] * 6
    drag(opened, 0.25, 0.5)
    for low, high in opened.run(AXES):
        assert (low, high) == (pytest.approx(15, abs=0.5), pytest.approx(30, abs=0.5))
    assert opened.run("document.querySelector('.reset').hidden") is False
    opened.click(".u-over", count=2)
    assert opened.run(AXES) == [[0, 60]] * 6
    drag(opened, 0.25, 0.5)
    opened.click(".reset")
    assert opened.run(AXES) == [[0, 60]] * 6


def test_the_legend_switches_a_curve_and_the_axis_follows(browser: Browser, make_run: MakeRun) -> None:
    show(browser, *compared(make_run))
    shown = "plots.map(({u}) => u.series.slice(1).map(one => one.show))"
    assert browser.run(shown)[0] == [True] * 6
    browser.click("button.key")
    assert browser.run(shown)[0] == [False, True, True] * 2
    assert browser.run(shown)[1] == [False, True, True], "a run is switched in every chart"
    assert browser.run("document.querySelector('button.key').ariaPressed") == "false"
    browser.click("button.key")
    assert browser.run(shown)[0] == [True] * 6


def test_a_click_on_a_title_sorts_the_runs(browser: Browser, make_run: MakeRun) -> None:
    runs = compared(make_run)
    runs[0].summary.unlink()
    runs[0].metrics.unlink()
    show(browser, *runs, width=390)
    order = "[...document.querySelectorAll('table.runs tbody tr')].map(row => row.cells[0].textContent.trim()[0])"
    assert browser.run(order) == ["1", "2", "3"]
    for column, ways in ((7, (["2", "3", "1"], ["3", "2", "1"])), (3, (["3", "2", "1"], ["1", "3", "2"]))):
        for expected in ways:  # the first run has no perplexity, and is unfinished
            browser.click(f"table.runs th:nth-child({column}) button")
            assert browser.run(order) == expected
    assert browser.run("document.querySelector('th:nth-child(3)').ariaSort") == "descending"


def test_the_pointer_tells_the_values_of_every_curve(opened: Browser, make_run: MakeRun) -> None:
    box = place(opened)
    opened.mouse("mouseMoved", box["x"] + box["width"] * 43 / 60, box["y"] + 50)
    told = opened.run("document.querySelector('.tip').innerText").split("\n")
    drawn = opened.run("page.charts[0].curves.map(({label, x, y}) => [label, x, y])")
    values = {label: dict(zip(x, y, strict=True)) for label, x, y in drawn}
    assert told[told.index("step") + 1] == "43"
    assert float(told[told.index("train, each step") + 1]) == pytest.approx(values["train, each step"][43], rel=1e-3)
    assert float(told[told.index("held out (step 40)") + 1]) == pytest.approx(values["held out"][40], rel=1e-3)


def test_tokens_and_time_are_axes_too_and_the_scale_can_be_logarithmic(opened: Browser) -> None:
    opened.run("(e => { e.value = 1; e.dispatchEvent(new Event('change', {bubbles: true})); })(axis)")
    (low, high), *_ = opened.run(AXES)
    assert (low, high) == (0, pytest.approx(60 * 8192))
    assert opened.run("plots[0].u.axes[0].label") == "tokens"
    opened.click("input.log")
    assert opened.run("plots.map(({u}) => u.scales.y.distr)") == [3, 1, 1, 1, 1, 1]


def test_no_curve_and_no_zoom_makes_the_page_hang(opened: Browser) -> None:
    opened.click("input.log")
    for at in range(4):
        opened.run(f"document.querySelectorAll('button.key')[{at}]?.click()")
    assert not any(opened.run("plots[0].u.series.slice(1).map(one => one.show)"))
    opened.run("document.querySelector('.plot').focus()")
    for _ in range(80):
        opened.press("+")
    low, high = opened.run(AXES)[0]
    assert 60 / 1e5 < high - low < 60 / 4e4
    assert opened.refused == []


EXTREME = {
    "steps": (("9" * 400, "1"), ("9" * 401, "2")),
    "order": (("5", "1"), ("3", "1"), ("3", "2"), ("-4", "1"), ("9", "2")),
    "values": (("1", "1e308"), ("2", "-1e308"), ("3", "5e-324"), ("4", "0"), ("5", "1e-300")),
    "tiny": (("0", "5e-324"), ("1", "1e-323")),
    "wide": (("1", "1e-90"), ("2", "1e90")),
    "level": (("1", "1e99"), ("2", "1e99")),
    "late": ((str((1 << 40) - 1), "1"), (str(1 << 40), "1")),
}


@pytest.mark.parametrize("case", EXTREME)
def test_no_figure_makes_the_page_hang(browser: Browser, make_run: MakeRun, case: str) -> None:
    run = make_run(steps=60)
    columns = run.metrics.read_text().splitlines()[0]
    rows = [",".join([step, *[value] * columns.count(",")]) for step, value in EXTREME[case]]
    run.metrics.write_text("\n".join([columns, *rows]) + "\n")
    show(browser, run)
    for axis in range(browser.run("page.axes.length")):
        browser.run(f"(e => {{ e.value = {axis}; e.dispatchEvent(new Event('change', {{bubbles: true}})); }})(axis)")
        browser.run("for (const box of document.querySelectorAll('input.log')) box.click()")
    assert browser.refused == []


def test_a_finger_zooms_and_asks_for_values(opened: Browser) -> None:
    box = place(opened)
    at, y = (lambda share: box["x"] + share * box["width"]), box["y"] + box["height"] / 2
    opened.touch((at(0.5), y))
    opened.wait("getComputedStyle(document.querySelector('.tip')).display === 'block'")
    opened.touch((at(0.25), y), (at(0.4), y), (at(0.5), y))
    opened.wait(f"Math.abs({AXES}[3][0] - 15) < 0.5 && Math.abs({AXES}[3][1] - 30) < 0.5")


def test_keys_zoom_and_move(opened: Browser) -> None:
    opened.run("document.querySelector('.plot').focus()")
    opened.press("ArrowRight")
    assert opened.run("getComputedStyle(document.querySelector('.tip')).display") == "block"
    opened.press("+")
    low, high = opened.run(AXES)[3]
    assert high - low == pytest.approx(30)
    opened.press("0")
    assert opened.run(AXES)[3] == [0, 60]


@pytest.mark.slow
def test_a_served_page_shows_new_steps_and_keeps_what_the_reader_chose(browser: Browser, make_run: MakeRun) -> None:
    run = make_run(steps=60)
    *_, last = run.metrics.read_text().splitlines()
    with ReportServer(pages_of([run]), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        browser.open(server.address)
        browser.click("button.key")
        drag(browser, 0.25, 0.5)
        zoomed = browser.run(AXES)
        browser.run("document.querySelector('details').open = true")
        with open(run.metrics, "a") as file:
            file.write(last.replace("60,", "61,", 1) + "\n")
        browser.wait("page.charts[0].curves[0].x.at(-1) === 61")
        assert browser.run(AXES) == zoomed
        assert browser.run("plots[0].u.series[1].show") is False
        assert browser.run("document.querySelector('details').open") is True
        server.shutdown()
    browser.wait("document.querySelector('.live').textContent.startsWith('The server does not answer')")


@pytest.mark.parametrize(("width", "classes"), [(1400, 2), (1400, 10), (1400, 40), (420, 10), (420, 40)])
def test_a_confusion_matrix_is_shown_whole_or_scrolls_in_its_box(
    browser: Browser, make_run: MakeRun, width: int, classes: int
) -> None:
    names = [f"n0250{at:04} an african elephant of_the_savannah" for at in range(classes)]
    counts = [[1000 + row if row == column else column for column in range(classes)] for row in range(classes)]
    show(browser, make_run(steps=6, summary={"found": {"confusion": counts}, "data": {"classes": names}}), width=width)
    assert browser.run("document.documentElement.scrollWidth") == width and browser.refused == []
    box = "document.querySelector('.matrix').parentElement"
    whole = browser.run(f"{box}.scrollWidth === {box}.clientWidth")
    assert whole == (width == 1400 and classes <= 10)
    seen = browser.run(
        f"(b => {{ b.scrollLeft = b.scrollWidth; const c = b.getBoundingClientRect(),"
        " r = [...b.querySelectorAll('td')].at(-1).getBoundingClientRect();"
        f" return r.left >= c.left && r.right <= c.right + 1; }})({box})"
    )
    assert seen, "the last class's column can be reached"
    assert browser.run("[...document.querySelectorAll('.matrix td')].map(e => e.textContent).slice(0, 2)") == [
        "1,000",
        "1",
    ]
