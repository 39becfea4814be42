"""Tables at the end of the report: what the matrix, the axes and the transfers found; last, what was skipped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.needs import show_skipped

CELLS: dict[tuple[str, str, str], str] = {}
"""(strategy, model, feature) -> the worst error over its bound, or what went wrong."""
TRANSFER_CELLS: dict[tuple[str, str], str] = {}
"""(strategy, model) -> the worst error of a loss or norm after going on from the canonical checkpoint."""
AXES_CELLS: dict[tuple[str, str], str] = {}
"""(topology, model) -> the same."""
TOLD: list[str] = []
"""What other tests counted, a line each."""
TABLES: dict[str, dict[Any, str]] = {"cells": CELLS, "transfer_cells": TRANSFER_CELLS, "axes_cells": AXES_CELLS}


def pytest_sessionfinish(session: Any) -> None:
    """A process of pytest-xdist hands its cells to the one that writes the report."""
    if hasattr(session.config, "workeroutput"):
        for name, found in TABLES.items():
            session.config.workeroutput[name] = [[list(key), cell] for key, cell in found.items()]
        session.config.workeroutput["told"] = TOLD


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    for name, found in TABLES.items():
        for key, cell in getattr(node, "workeroutput", {}).get(name, []):
            found[tuple(key)] = cell
    TOLD.extend(getattr(node, "workeroutput", {}).get("told", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    _show_tables(terminalreporter)
    show_skipped(terminalreporter)


def _show_tables(terminalreporter: Any) -> None:
    if TOLD:
        terminalreporter.section("counted")
        for line in TOLD:
            terminalreporter.line(line)
    if AXES_CELLS:
        _table(terminalreporter, "axes: parity with one process: worst error over its bound", AXES_CELLS)
    if TRANSFER_CELLS:
        title = "checkpoints: read, written again bit-equal, gone on: worst error of loss and norm (bound 1e-5)"
        _table(terminalreporter, title, TRANSFER_CELLS)
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


def _table(terminalreporter: Any, title: str, found: dict[tuple[str, str], str]) -> None:
    names, models = (list(dict.fromkeys(key[part] for key in found)) for part in (0, 1))
    wide = max(map(len, names))
    terminalreporter.section(title)
    terminalreporter.line(f"{'':{wide}}" + "".join(f"{model:>12}" for model in models))
    for name in names:
        cells = "".join(f"{found.get((name, model), '-'):>12}" for model in models)
        terminalreporter.line(f"{name:{wide}}{cells}")
