from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.paths import RunPaths
from tests.report.fake_runs import MakeRun, make_run


@pytest.fixture(name="make_run")
def make_run_fixture(tmp_path: Path) -> MakeRun:
    """``make_run`` below ``tmp_path / "outputs"``."""

    def make(**options: Any) -> RunPaths:
        return make_run(tmp_path / "outputs", **options)

    return make
