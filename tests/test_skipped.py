"""What was skipped is listed at the end of the report, with one line that installs what was missing."""

from __future__ import annotations

import types
from typing import Any

from mgpu_pipe.errors import ConfigError
from tests.support.needs import install_lines, show_skipped


class Reporter:
    def __init__(self, reasons: list[Any]) -> None:
        self.stats = {"skipped": [types.SimpleNamespace(longrepr=reason) for reason in reasons]} if reasons else {}
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_counted_by_reason_with_one_line_to_install() -> None:
    libaio = str(
        ConfigError(
            "strategy.offload",
            "nvme",
            "install libaio (Debian and Ubuntu: apt-get install libaio-dev; Fedora: libaio-devel)",
            "it is not here",
        )
    )
    here, elsewhere = ("tests/a.py", 1, f"Skipped: {libaio}"), ["tests/b.py", 2, f"Skipped: {libaio}"]
    bare = ("tests/c.py", 4, "Skipped: could not import 'jiwer.x': No module named 'jiwer'")
    reporter = Reporter([here, elsewhere, ("tests/c.py", 3, "Skipped: needs a GPU"), bare])
    show_skipped(reporter)
    title, *counted, install = reporter.lines
    assert title == "skipped"
    assert counted == ["   1 x needs a GPU", "   1 x needs jiwer: pip install jiwer", f"   2 x {libaio}"]
    assert install.endswith(": apt-get install libaio-dev && pip install jiwer")


def test_nothing_is_said_where_nothing_was_skipped() -> None:
    reporter = Reporter([])
    show_skipped(reporter)
    assert reporter.lines == []


def test_every_package_once() -> None:
    reasons = ["install one (apt-get install g++), or set CXX; x: install it: pip install ninja", "apt-get install g++"]
    assert install_lines(reasons) == ["apt-get install g++", "pip install ninja"]
