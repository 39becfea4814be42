"""The matrix of strategies as a table at the end of the report; and what NVMe offload needs of the machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mgpu_pipe.config.compose import compose
from mgpu_pipe.launch.extensions import prepare_extensions
from mgpu_pipe.launch.offload import compiler_errors
from mgpu_pipe.strategies.build_extension import FOLDER

CELLS: dict[tuple[str, str, str], str] = {}
"""(strategy, model, feature) -> the worst error over its bound, or what went wrong."""
TRANSFER_CELLS: dict[tuple[str, str], str] = {}
"""(strategy, model) -> the worst error of a loss or norm after going on from the canonical checkpoint."""
AXES_CELLS: dict[tuple[str, str], str] = {}
"""(topology, model) -> the same."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
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


@pytest.fixture(scope="session")
def nvme_extension() -> str:
    """Where DeepSpeed's NVMe access is compiled; it stays in the user's cache, since compiling takes minutes."""
    missing = compiler_errors()
    if missing:
        pytest.skip("; ".join(str(error) for error in missing))
    config, _ = compose(["strategy=zero3_nvme"])
    prepare_extensions(config)
    return os.environ.pop(FOLDER)
