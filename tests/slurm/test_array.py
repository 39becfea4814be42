"""A sweep as one array of a real cluster. Oracle: the same sweep, run by this machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.launch import signals as stop
from mgpu_pipe.launch.slurm import slurm_job
from mgpu_pipe.launch.slurm import submit_job as slurm
from mgpu_pipe.launch.slurm.script import POINTS
from mgpu_pipe.runs.lock import RunLock
from mgpu_pipe.sweep import slurm_array, slurm_point
from mgpu_pipe.sweep.run_points import take
from mgpu_pipe.sweep.store import Store, create
from tests.slurm.test_disturbed import SLOW, attempts, reached
from tests.slurm.test_script import configured
from tests.support.command import REPOSITORY, column, launched, mgpu
from tests.support.slurm_cluster import TINY, Cluster
from tests.sweep.support import asked

ARRAY = ("-m", "hydra/launcher=slurm", *(word for word in TINY if word != "launch=slurm"), "sweep.name=tried")


def points(cache: Path, cwd: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(mgpu(cache, cwd, "sweeps", "show", "tried", "--json"))["points"]
    return found


def submitted(cache: Path, cwd: Path, *words: str) -> str:
    """The array's number."""
    job, sweep = mgpu(cache, cwd, *ARRAY, *words).splitlines()[-2:]
    assert sweep == f"sweep: {cwd}/outputs/sweeps/tried"
    return job.removeprefix("job: ")


def finished(cluster: Cluster, cache: Path, cwd: Path) -> None:
    store = Store(cwd / "outputs/sweeps/tried")

    def states() -> bool:
        return {point.status for point in store.points()} == {"finished"}

    try:
        cluster.until(states, "all finished")
    except AssertionError:
        print(points(cache, cwd), *(log.read_text() for log in (cwd / "outputs/sweeps/tried/logs").iterdir()))
        raise


@pytest.mark.slow
def test_a_member_that_is_queued_again_leaves_the_others_alone(cluster: Cluster, cache: Path, shared: Path) -> None:
    """The last member, whose job number is the array's own."""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    words = ["seed=1,2", "trainer.max_steps=16", "checkpoint.every_n_steps=4", "strategy=single"]
    there = shared / "here"
    there.mkdir()
    alone = ["launch=local", "hydra/launcher=basic", "trainer.devices=1"]
    local = launched(cache, there, *ARRAY, *words, *alone)  # while the cluster's runs wait for nodes
    array = submitted(cache, shared, *words, *SLOW, "trainer.devices=1")
    first, last = (Path(point["folder"]) for point in points(cache, shared))
    cluster.until(lambda: reached(first, 2) and reached(last, 6), "step 6", array)
    mgpu(cache, shared, "jobs", "requeue", str(last))
    finished(cluster, cache, shared)
    assert [entry["status"] for entry in attempts(first)] == ["finished"]
    assert [entry["status"] for entry in attempts(last)] == ["stopped", "finished"]

    _, said = local.communicate()
    assert local.returncode == 0, said
    swept = points(cache, shared)
    for mine, theirs in zip(swept, points(cache, there), strict=True):
        assert mine["overrides"] == theirs["overrides"]
        assert mine["metrics"]["train/loss"] == theirs["metrics"]["train/loss"]
        assert column(Path(mine["folder"]), "train/loss") == column(Path(theirs["folder"]), "train/loss")
    assert [point["attempts"] for point in swept] == [1, 2]
    assert "repeat it: mgpu-pipe submit " in mgpu(cache, shared, "sweeps", "best", "tried")
    assert "no point is left to run: 2 of 2 finished" in mgpu(cache, shared, "sweeps", "resume", "tried")
    cluster.until(cluster.nothing_left, "the end of all processes")


@pytest.mark.exhaustive
def test_four_runs_of_two_nodes_each_and_what_was_cancelled_is_brought_back(
    cluster: Cluster, cache: Path, shared: Path
) -> None:
    words = ["strategy=ddp,zero3", "optimizer.lr=1e-3,3e-4", "trainer.num_nodes=2", "trainer.devices=2"]
    submitted(cache, shared, *words, "trainer.max_steps=3", "launch.sbatch=['--hold']")
    jobs = json.loads(mgpu(cache, shared, "jobs", "--json"))
    assert [job["run"] for job in jobs] == [point["folder"] for point in points(cache, shared)] and len(jobs) == 4
    assert "cancel it first" in mgpu(cache, shared, "sweeps", "resume", "tried", code=2)
    assert "cancelled: 4 of 4 runs" in mgpu(cache, shared, "sweeps", "cancel", "tried")
    assert {point["status"] for point in points(cache, shared)} == {"cancelled"}
    again = mgpu(cache, shared, "sweeps", "retry", "tried").splitlines()[-2].removeprefix("job: ")
    cluster.ask("scontrol", "release", again)
    finished(cluster, cache, shared)
    assert [point["metrics"].keys() >= {"train/loss"} for point in points(cache, shared)] == [True] * 4


@pytest.mark.slow
def test_what_is_refused_leaves_nothing(cluster: Cluster, cache: Path, shared: Path) -> None:
    devices = "trainer.devices=1"
    for words, said in (
        (["data.seq_len=32,0", devices], "error: point 2 (data.seq_len=0) cannot run: data.seq_len=0: "),
        (
            [devices, "strategy=ddp", "trainer.num_nodes=1,2"],
            "point 2 (trainer.num_nodes=2) cannot run: it asks the cluster for",
        ),
        ([devices, "seed=1,2", "launch.partition=nowhere"], "error: launch.partition=nowhere: SLURM answers: "),
        ([devices, "seed=1,2", "launch=local"], "error: launch.type=local: hydra/launcher=slurm submits jobs; "),
        ([devices, "optimizer.lr=interval(1e-4,1e-3)", "sweep.search=random"], "error: sweep.search=random: "),
        (["seed=1,2", "strategy=ddp", "trainer.accelerator=cuda"], "trainer.devices=auto: this machine does not know"),
    ):
        assert said in mgpu(cache, shared, *ARRAY, *words, code=2)
        assert not list((shared / "outputs").glob("*/*")), words
    assert cluster.ask("squeue", "--noheader") == ""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins: sbatch gives the array 12, squeue knows none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", f"echo 12; echo again >> {folder}/submitted"), ("squeue", "true")):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return folder


ONE = [*ARRAY, "trainer.devices=1", "trainer.max_steps=3"]


def test_two_submit_what_is_left_once_and_what_is_printed_can_be_typed(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "it's here, a=b"
    there.mkdir()
    monkeypatch.chdir(there)
    assert cli.main([*ONE, "seed=1,2"]) == 0
    said = capsys.readouterr().err.splitlines()
    words = shlex.split(next(line for line in said if line.startswith("resume: ")).removeprefix("resume: "))
    monkeypatch.chdir(tmp_path)
    resume = words[words.index("sweeps") :]
    assert resume[:3] == ["sweeps", "resume", "tried"]
    with RunLock(there / "outputs" / "sweeps" / "tried" / "lock"):  # another resume, which asks squeue
        assert cli.main(resume) == 2
    assert "another launch is preparing" in capsys.readouterr().err
    assert cli.main(resume) == 0
    assert (tools / "submitted").read_text() == "again\n" * 2


def test_a_submission_that_is_stopped_while_points_are_frozen_leaves_nothing(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze, frozen = slurm_array._freeze, 0

    def stopped(*given: Any) -> Any:
        nonlocal frozen
        frozen += 1
        if frozen == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return freeze(*given)

    with monkeypatch.context() as inside:
        inside.setattr(slurm_array, "_freeze", stopped)
        assert cli.main([*ONE, "seed=1,2,3"]) not in (0, None)
    assert frozen == 2 and not list((tmp_path / "outputs").glob("*/*")) and not (tools / "submitted").exists()
    assert cli.main([*ONE, "seed=1,2,3"]) == 0, "the name is free"


def test_a_run_whose_folder_would_be_two_lines_is_refused(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ONE, "run.name='a\nb',c"]) == 2
    assert "point 1 (" in (said := capsys.readouterr().err) and "SLURM cannot write a log there" in said
    for name in ("a\nb", "a\\b", "-x"):
        assert cli.main([*ONE, "seed=1,2", f"sweep.name='{name}'"]) == 2
        assert "use a plain folder name" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_a_second_job_of_a_point_leaves_it_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    store = create(tmp_path, "tried", asked(), [[["seed=1"]]], [str(run)])
    first = take(store, store.points()[0])
    assert first is not None
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setattr(stop, "leave_until_a_run_begins", lambda: None)
    monkeypatch.setattr(slurm_job, "main", lambda folder, again: 2)
    with RunLock(RunPaths(run).lock):
        assert slurm_point.main(run, store.folder) == 2
    assert store.points() == [first]
    assert slurm_point.main(run, store.folder) == 2 and store.points()[0].status == "failed"


def test_the_script_calls_a_member_by_its_place(tmp_path: Path) -> None:
    """Run by bash, with stand-ins for srun and scontrol."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/run\nexit 75\n')
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/asked\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    runs = [tmp_path / "a", tmp_path / 'it\'s 50% "of" $HOME']
    runs[1].mkdir()
    (runs[1] / "bad_nodes.txt").write_text("n1 no memory\n")
    (tmp_path / POINTS).write_text("".join(f"{run}\n" for run in runs))
    config = configured("launch.array_limit=3")
    slurm.write_script(slurm.slurm_keys(config.launch), config.trainer, tmp_path, "swept", [], 2)
    told = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    environment = {**os.environ, **told, "PATH": f"{tools}:{os.environ['PATH']}"}
    assert subprocess.run([tmp_path / slurm.SCRIPT], env=environment).returncode == 75
    assert (tmp_path / "run").read_text().splitlines()[-3:] == [
        "mgpu_pipe.sweep.slurm_point",
        str(runs[1]),
        str(tmp_path),
    ]
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 12_1", "update JobId=12_1 ExcNodeList=n1"]
    script = (tmp_path / slurm.SCRIPT).read_text()
    assert "#SBATCH --array=0-1%3\n" in script and "slurm-%A_%a.log" in script
