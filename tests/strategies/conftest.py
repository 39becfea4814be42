"""The matrix of strategies as a table at the end of the test report."""

from __future__ import annotations

from typing import Any

CELLS: dict[tuple[str, str, str], str] = {}
"""(strategy, model, feature) -> the worst error over its bound, or what went wrong."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not CELLS:
        return
    strategies = list(dict.fromkeys(key[0] for key in CELLS))
    rows = list(dict.fromkeys(key[1:] for key in CELLS))
    wide = max(len(f"{model}, {feature}") for model, feature in rows)
    terminalreporter.section("parity with one process: worst error over its bound")
    terminalreporter.line(f"{'':{wide}}" + "".join(f"{name:>12}" for name in strategies))
    for model, feature in rows:
        cells = "".join(f"{CELLS.get((name, model, feature), '-'):>12}" for name in strategies)
        terminalreporter.line(f"{f'{model}, {feature}':{wide}}{cells}")
