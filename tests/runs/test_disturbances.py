"""Random signals at random instants: the script of the two hundred, with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness.disturbances import Disturbances

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [3, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_nothing_is_lost_or_different_or_left(count: int, tmp_path: Path) -> None:
    """Raises what it finds; ``python -m benchmarks.robustness.disturbances --count 200`` is the long form."""
    disturbances = Disturbances(tmp_path, seed=2, real=0.0)
    disturbances.go(count)
    assert sum(disturbances.tally.by_phase.values()) == count
