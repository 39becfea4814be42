"""Runs that SLURM starts, on a real cluster of three nodes. Oracle: the same configuration trained by this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgpu_pipe.runs.resume_command import hydra_quoted
from tests.support.command import column, mgpu, run_folder
from tests.support.slurm_cluster import TINY, Cluster

pytestmark = pytest.mark.slow
FSDP = (*TINY, "strategy=fsdp", "trainer.max_steps=4")
TWO_NODES = ("trainer.num_nodes=2", "trainer.devices=2")


@pytest.fixture(scope="module")
def local(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as four processes of this machine."""
    words = [*FSDP, "launch=local", "trainer.devices=4"]
    return run_folder(mgpu(cache, tmp_path_factory.mktemp("local"), *words))


@pytest.mark.exhaustive
def test_two_nodes_train_what_one_machine_trains(cluster: Cluster, cache: Path, local: Path, shared: Path) -> None:
    """One task a node and one task a GPU, at the same time; the latter in a folder with a difficult name."""
    hard = shared / 'it\'s 50% "of" $HOME'
    jobs = [
        cluster.submit(cache, shared, *FSDP, *TWO_NODES, "launch.cpus=1"),
        cluster.submit(
            cache, shared, *FSDP, *TWO_NODES, "launch.tasks=gpu", "launch.gpus=2", "launch.gpu_type=fake",
            f"run.dir={hydra_quoted(str(hard))}",
        ),
    ]  # fmt: skip
    for job, folder in jobs:
        assert cluster.ended(job, folder) == "COMPLETED"
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            assert column(folder, name) == column(local, name)
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["step"], summary["world_size"]) == ("finished", 4, 4)
        assert "run: " in cluster.log(folder)
    assert jobs[1][1] == hard
    cluster.until(cluster.nothing_left, "the end of all processes")


def test_refusals_of_slurm_name_the_key_and_leave_nothing(cluster: Cluster, cache: Path, shared: Path) -> None:
    for word, said in (
        ("launch.partition=nowhere", "error: launch.partition=nowhere: SLURM answers: "),
        ("launch.gpus=3", "error: launch.gpus=3: SLURM answers: "),
        ("trainer.num_nodes=4", "error: trainer.num_nodes=4: SLURM answers: "),
        ("launch.time=3-00:00:00", "error: launch.time=3-00:00:00: SLURM answers: "),
        ("launch.constraint=fast", "error: launch.constraint=fast: SLURM answers: "),
    ):
        out = mgpu(cache, shared, "submit", *FSDP, "trainer.devices=1", word, code=2)
        errors = [line for line in out.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and errors[0].startswith(said), out
    assert not list((shared / "outputs").glob("*/*")), "nothing is submitted by half"
    assert cluster.ask("squeue", "--noheader") == ""


def test_a_run_has_one_job_at_a_time(cluster: Cluster, cache: Path, shared: Path) -> None:
    words = [*FSDP, "run.dir=once", "checkpoint.resume=auto", "launch.sbatch=['--hold']"]
    job, folder = cluster.submit(cache, shared, *words)
    out = mgpu(cache, shared, "submit", *words, code=2)
    assert f"this run is queued or running as job {job}; cancel it first: scancel {job}" in out
    cluster.ask("scancel", job)
    again, same = cluster.submit(cache, shared, *words)
    assert same == folder and again != job
    cluster.ask("scancel", again)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tasks", ["node", "gpu"])
def test_the_command_of_the_readme_with_deepspeed(cluster: Cluster, cache: Path, shared: Path, tasks: str) -> None:
    words = [*TINY, "strategy=zero3", "trainer.max_steps=4"]
    local = run_folder(mgpu(cache, shared, *words, "launch=local", "trainer.devices=4", "run.name=local"))
    job, folder = cluster.submit(cache, shared, *words, *TWO_NODES, f"launch.tasks={tasks}")
    assert cluster.ended(job, folder) == "COMPLETED"
    assert column(folder, "train/loss") == column(local, "train/loss")
