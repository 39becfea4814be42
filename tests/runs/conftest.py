"""The run of one process that others are compared with, and its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.support import overrides
from tests.support.command import mgpu, run_folder


@pytest.fixture(scope="session")
def alone(cache: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(mgpu(cache, tmp_path_factory.mktemp("alone"), *overrides(corpus, "strategy=single")))


@pytest.fixture(scope="module")
def base(cache: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, as one downloads it."""
    out = tmp_path_factory.mktemp("base") / "model"
    mgpu(cache, out.parent, "export", str(alone), "--out", str(out))
    return out
