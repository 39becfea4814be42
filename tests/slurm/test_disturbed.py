"""Runs that a real cluster preempts, requeues, stops at their limit, or whose node dies.

Oracle: the same run undisturbed, on this machine; its metrics must be equal bit for bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import REPOSITORY, column, launched, metrics, mgpu, run_folder
from tests.support.slurm_cluster import TINY, Cluster
from tests.support.slurm_disturbances import Disturb, kill_node, preempt, requeue, revive, warn

pytestmark = pytest.mark.slow
STEPS = 24
WORDS = (*TINY, "strategy=fsdp", f"trainer.max_steps={STEPS}", "checkpoint.every_n_steps=4")
SLOW = ("callbacks.slow._target_=tests.support.slow.Slow", "callbacks.slow.seconds=0.4")
TWO_NODES = ("trainer.num_nodes=2", "trainer.devices=2")


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(mgpu(cache, tmp_path_factory.mktemp("local"), *WORDS, "launch=local", "trainer.devices=4"))


def reached(folder: Path, step: int) -> bool:
    return (folder / "metrics.csv").exists() and any(int(row["step"]) >= step for row in metrics(folder) if row["step"])


def attempts(folder: Path) -> list[dict[str, Any]]:
    path = folder / "attempts.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def disturbed(
    cluster: Cluster, cache: Path, shared: Path, disturbances: list[tuple[int, Disturb]], *words: str
) -> tuple[str, Path]:
    """A run over two nodes that is disturbed once it has reached each of these steps; its end is waited for."""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    job, folder = cluster.submit(cache, shared, *WORDS, *SLOW, *TWO_NODES, *words)
    for number, (step, disturb) in enumerate(disturbances):
        cluster.until(lambda step=step: reached(folder, step), f"step {step}", job)  # type: ignore[misc]
        disturb(cluster, job)
        cluster.until(lambda n=number: len(attempts(folder)) > n + 1, f"attempt {number + 2}", job)  # type: ignore[misc]
    assert cluster.ended(job, folder) == "COMPLETED"
    return job, folder


def assert_equal(folder: Path, undisturbed: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(folder, name) == column(undisturbed, name)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_preempted_and_killed_it_goes_on_by_itself(cluster: Cluster, cache: Path, shared: Path, devices: int) -> None:
    here = ("launch=local", "trainer.num_nodes=1", f"trainer.devices={2 * devices}", "run.name=here")
    local = launched(cache, shared, *WORDS, *here)  # while the cluster's run waits for nodes
    try:
        _, folder = disturbed(cluster, cache, shared, [(5, preempt), (14, kill_node)], f"trainer.devices={devices}")
    finally:
        revive(cluster)
    out, said = local.communicate()
    assert local.returncode == 0, said
    assert_equal(folder, run_folder(out))
    summary = json.loads((folder / "summary.json").read_text())
    first, second, third = summary["attempts"]
    assert summary["status"] == third["status"] == "finished" and third["step"] == STEPS
    assert (first["status"], first["lost_s"]) == ("stopped", 0) and "SIG" in first["cause"]
    assert second["status"] == "failed" and second["lost_s"] > 0 and second["from_step"] == first["step"]
    assert third["from_step"] in (12, 16) and "n" in third["nodes"]
    cluster.until(cluster.nothing_left, "the end of all processes")


@pytest.mark.exhaustive
@pytest.mark.parametrize("tasks", ["node", "gpu"])
@pytest.mark.parametrize("disturb", [preempt, requeue, warn, kill_node])
def test_disturbed_by(
    cluster: Cluster, cache: Path, undisturbed: Path, shared: Path, disturb: Disturb, tasks: str
) -> None:
    try:
        _, folder = disturbed(cluster, cache, shared, [(6, disturb)], f"launch.tasks={tasks}")
    finally:
        revive(cluster)
    assert_equal(folder, undisturbed)
    assert [entry["status"] for entry in attempts(folder)][-1] == "finished"


ONE = (*TINY, "trainer.devices=1")
"""One worker, on one node."""


@pytest.mark.exhaustive
def test_a_bad_node_is_left_out_and_a_cancelled_job_is_not_queued_again(
    cluster: Cluster, cache: Path, shared: Path, tmp_path: Path
) -> None:
    """Three jobs beside one another: on a node without its memory, cancelled, and crashing every time."""
    prolog = tmp_path / "prolog"
    prolog.write_text('#!/bin/bash\n[ "$SLURMD_NODENAME" != n0 ] || echo export SLURM_MEM_PER_NODE=99999999\n')
    prolog.chmod(0o755)
    (tmp_path / "crash.py").write_text(CRASH)
    bad, left_out = cluster.submit(
        cache, shared, *ONE, "trainer.max_steps=2", f"launch.srun=['--task-prolog={prolog}']"
    )
    cancelled, saved = cluster.submit(cache, shared, *ONE, *SLOW, "trainer.max_steps=400", "run.name=saved")
    words = ["callbacks.crash._target_=crash.Crash", "launch.max_restarts_without_progress=1", "run.name=crashing"]
    crashing, crashed = cluster.submit(cache, tmp_path, *ONE, *words, "trainer.max_steps=3", "launch.exclude=n2")

    cluster.until(lambda: reached(saved, 2), "step 2", cancelled)
    cluster.ask("scancel", cancelled)
    assert cluster.ended(cancelled, saved) == "CANCELLED"
    cluster.until(lambda: attempts(saved)[-1]["ended"], "the end")
    assert attempts(saved)[-1]["status"] == "stopped" and list((saved / "checkpoints").glob("step-*"))

    assert cluster.ended(bad, left_out) == "COMPLETED"
    assert "99999999 were asked for; the job is queued again without it" in cluster.log(left_out)
    (entry,) = attempts(left_out)
    assert entry["left_out"].startswith("n0 ") and entry["nodes"] != "n0"

    assert cluster.ended(crashing, crashed) == "FAILED"
    summary = json.loads((crashed / "summary.json").read_text())
    assert summary["status"] == "failed" and len(summary["attempts"]) == 2
    assert "launch.max_restarts_without_progress=1: the last 2 attempts crashed" in summary["error"]["message"]
    assert {entry["cause"] for entry in attempts(crashed)} == {"it crashes"}


@pytest.mark.exhaustive
def test_a_node_that_does_not_reach_the_first_one_is_left_out(
    cluster: Cluster, cache: Path, shared: Path, tmp_path: Path
) -> None:
    """The tasks of n1 are sent to a closed port; of three nodes two are left, so that the job waits for a third."""
    prolog = tmp_path / "prolog"
    prolog.write_text('#!/bin/bash\n[ "$SLURMD_NODENAME" != n1 ] || echo export MASTER_PORT=1\n')
    prolog.chmod(0o755)
    words = [*TINY, "trainer.num_nodes=3", "trainer.devices=1", "strategy=ddp", "data.global_batch_size=6"]
    plant = ["launch.collective_timeout=10", f"launch.srun=['--task-prolog={prolog}']"]
    job, folder = cluster.submit(cache, shared, *words, *plant, "trainer.max_steps=2")
    cluster.until(lambda: "ExcNodeList=n1" in cluster.ask("scontrol", "show", "job", job).split(), "left out", job)
    assert "error: node n1: it did not reach n0 (" in cluster.log(folder)
    cluster.ask("scancel", job)
    cluster.until(cluster.nothing_left, "the end of all processes")


CRASH = """
from pytorch_lightning import Callback


class Crash(Callback):
    def on_train_batch_end(self, *_):
        raise RuntimeError("it crashes")
"""


@pytest.mark.exhaustive
def test_stopped_before_its_time_limit_it_goes_on(cluster: Cluster, cache: Path, shared: Path) -> None:
    """A real limit, of two minutes; the steps take longer."""
    words = (*ONE, "trainer.max_steps=150")
    whole = run_folder(mgpu(cache, shared, *words, "launch=local", "run.name=whole"))
    slow = ("callbacks.slow._target_=tests.support.slow.Slow", "callbacks.slow.seconds=0.6")
    job, folder = cluster.submit(cache, shared, *words, *slow, "launch.time=0:02:00", "launch.warning_s=50")
    assert cluster.ended(job, folder, seconds=500) == "COMPLETED"
    assert "SIGUSR1" in attempts(folder)[0]["cause"] and len(attempts(folder)) > 1
    assert column(folder, "train/loss") == column(whole, "train/loss")


@pytest.mark.exhaustive
def test_a_save_that_takes_longer_than_the_warning_begins_in_time(cluster: Cluster, cache: Path, shared: Path) -> None:
    """A save takes half a minute, so the run stops more than a minute before the limit of three.

    The warning is set to two seconds before the limit; SLURM may send it a minute earlier, after the stop all the same.
    """
    words = (*ONE, "trainer.max_steps=200", "checkpoint.every_n_steps=100")
    whole = run_folder(mgpu(cache, shared, *words, "launch=local", "run.name=whole"))
    slow = ("callbacks.slow._target_=tests.support.slow.Slow", "callbacks.slow.seconds=0.6")
    disk = ("callbacks.disk._target_=tests.support.disk.SlowDisk", "callbacks.disk.seconds=0.25")
    job, folder = cluster.submit(cache, shared, *words, *slow, *disk, "launch.time=0:03:00", "launch.warning_s=2")
    assert cluster.ended(job, folder, seconds=600) == "COMPLETED"
    first, second = attempts(folder)[:2]
    assert (first["status"], first["lost_s"], first["step"]) == ("stopped", 0, second["from_step"])
    assert "stopping after this step: the job ends in " in (folder / "logs" / "rank-0.log").read_text()
    assert column(folder, "train/loss") == column(whole, "train/loss")
