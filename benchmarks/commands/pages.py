"""What is looked at in a browser: the report of a long run, and the documentation's site, beside their bounds.

The run has 100,000 steps and four ranks' files; its report is written in a cold process and opened in headless
Chromium. The site is built from nothing, as by ``make docs``. ``python -m benchmarks.commands.pages`` needs both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.commands.runs_listing import cpu_seconds
from benchmarks.commands.startup import seconds
from benchmarks.support import finish
from mgpu_pipe.runs.metrics_file import RANK_COLUMNS, MetricsWriter
from tests.report.browser import Browser
from tests.report.fake_runs import make_run
from tests.support.command import REPOSITORY

STEPS, RANKS, ROUNDS = 100_000, 4, 5
SHOWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
"""Milliseconds from the begin of loading until what the script drew is on the screen."""
DRAWN = "(begun => { draw(); return performance.now() - begun; })(performance.now())"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder, steps=STEPS, summary={"world_size": RANKS})
        for rank in range(RANKS):
            writer = MetricsWriter(run.rank_metrics(rank), columns=RANK_COLUMNS)
            for step in range(1, STEPS + 1):
                writer.append({"step": step, "data_s": 1 / step, "cpu_s": 0.3 + step % 7, "peak_gib": 1.5 + rank})
            writer.close()
        before = cpu_seconds()
        seconds(["-m", "mgpu_pipe", "report", str(run.root)], folder)
        written = cpu_seconds() - before
        browser = Browser(folder / "browser")
        loads, draws = [], []
        for _ in range(ROUNDS):
            browser.open("about:blank")
            browser.open(run.report.as_uri())
            loads.append(browser.run(SHOWN) / 1000)
            draws.append(browser.run(DRAWN) / 1000)
        browser.close()
        rows: list[list[object]] = [
            ["report of 100,000 steps: size", run.report.stat().st_size / 1e6, "MB", 5],
            ["report: opened, until it is seen in Chromium", statistics.median(loads), "s", 1],
            ["report: its charts drawn", statistics.median(draws), "s", 1],
            ["report: processor time of writing it", written, "s", None],
        ]
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        before = cpu_seconds()
        build = ["-m", "sphinx", "--fail-on-warning", "--quiet", "-b", "html", "-d", str(folder / "doctrees")]
        took = seconds([*build, str(REPOSITORY / "docs"), str(folder / "site")], REPOSITORY)
        rows.append(["site: built from nothing", took, "s", 60])
        rows.append(["site: processor time of that", cpu_seconds() - before, "s", None])
    notes = (
        f"Of the browser medians of {ROUNDS} loads; the run's {RANKS} ranks have curves of their own. "
        "Where others use the machine, the processor's time says what the wall clock does not."
    )
    finish("pages", "Pages to look at", ["what", "measured", "unit", "bound"], rows, notes)


if __name__ == "__main__":
    main()
