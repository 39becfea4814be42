"""The cluster that a process of the test session uses: its own, so that files run beside one another."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import Cluster, end_cluster, start_cluster


@pytest.fixture(scope="session")
def cluster_of_session() -> Iterator[Cluster]:
    folder = Path(tempfile.gettempdir()) / f"slurm-of-tests-{os.getpid()}"  # munged wants folders that all may enter
    cluster = start_cluster(folder)
    try:
        yield cluster
    finally:
        end_cluster(folder)


@pytest.fixture
def cluster(cluster_of_session: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, which programs started by the test find by SLURM_CONF."""
    monkeypatch.setenv("SLURM_CONF", str(cluster_of_session.conf))
    return cluster_of_session


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where runs go: on one machine every folder is shared by all nodes."""
    return tmp_path
