"""The public plug-in's launcher on a real cluster. Oracle: the same configuration trained by this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import column, mgpu, run_folder
from tests.support.slurm_cluster import TINY, Cluster

WORDS = [*(word for word in TINY if word != "launch=slurm"), "strategy=ddp", "trainer.max_steps=3"]
JOB = {"mem_gb": "null", "nodes": 2, "tasks_per_node": 1, "timeout_min": 20}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_of_two_nodes_for_each_point(cluster: Cluster, cache: Path, shared: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install hydra-submitit-launcher")
    asked = ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{key}={value}" for key, value in JOB.items())]
    nodes = ["trainer.num_nodes=2", "trainer.devices=1", "optimizer.lr=1e-3,3e-4", "sweep.name=tried"]
    mgpu(cache, shared, "-m", *asked, *WORDS, *nodes)
    points = json.loads(mgpu(cache, shared, "sweeps", "show", "tried", "--json"))["points"]
    assert [point["status"] for point in points] == ["finished"] * 2
    for point in points:
        here = run_folder(mgpu(cache, shared, *WORDS, *point["overrides"], "trainer.devices=2", "run.name=here"))
        assert column(Path(point["folder"]), "train/loss") == column(here, "train/loss")
