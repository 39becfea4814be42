"""Random disturbances of a sweep on a real cluster, as benchmarks.robustness.slurm_disturbances describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness.slurm_disturbances import KINDS, Disturbances
from tests.support.slurm_cluster import Cluster


@pytest.mark.exhaustive
def test_two_disturbances_change_nothing(cluster: Cluster, shared: Path) -> None:
    disturbances = Disturbances(shared, cluster, seed=0, seeds=2)
    disturbances.go(2, ["kill a step", "signal"])  # test_array and test_jobs queue again
    assert disturbances.attempts > disturbances.runs


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_disturbances_of_all_kinds_change_nothing(cluster: Cluster, shared: Path, seed: int) -> None:
    disturbances = Disturbances(shared, cluster, seed=seed)
    disturbances.go(3 * len(KINDS), [*KINDS] * 3)
