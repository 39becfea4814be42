"""What needs a GPU is tested in this folder, and every test of it has a dry form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.conftest import pytest_runtest_makereport
from tests.support.command import REPOSITORY


def reported(outcome: str, reason: str) -> str:
    """The outcome of a test of this folder that was reported so."""
    report = SimpleNamespace(outcome=outcome, skipped=outcome == "skipped", longrepr=("a.py", 1, f"Skipped: {reason}"))
    wrapper = pytest_runtest_makereport()
    next(wrapper)
    with pytest.raises(StopIteration) as end:
        wrapper.send(report)
    return str(end.value.value.outcome)


def test_a_test_that_is_skipped_without_a_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reported("skipped", "needs a GPU") == "failed"
    assert reported("skipped", "recordings need jiwer: pip install jiwer") == "skipped"
    assert reported("passed", "") == "passed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reported("skipped", "needs two GPUs") == "skipped"


def test_no_other_test_asks_for_a_gpu() -> None:
    here = Path(__file__).parent
    others = [file for file in (REPOSITORY / "tests").rglob("*.py") if here not in file.parents]
    assert [str(file) for file in others if "cuda.is_available" in file.read_text(encoding="utf-8")] == []
