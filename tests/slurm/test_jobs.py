"""``mgpu-pipe jobs`` on a real cluster. Oracle: the files of the runs, and squeue."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli import main as cli
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.launch.slurm.script import seconds
from tests.support.command import column, launched
from tests.support.slurm_cluster import TINY, Cluster

ONE = (*TINY, "trainer.devices=1")
SLOW = ("callbacks.slow._target_=tests.support.slow.Slow", "callbacks.slow.seconds=0.3")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert cli.main(["jobs", "--json", *words]) == 0
    return {row["job"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_jobs_are_listed_followed_queued_again_and_cancelled(
    cluster: Cluster, cache: Path, shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where the slow callback is
    words = [*ONE, *SLOW, "trainer.max_steps=900", "launch.time=0:30:00"]
    job, folder = cluster.submit(cache, shared, *words)
    held, waiting = cluster.submit(
        cache, shared, *ONE, "trainer.max_steps=null", "trainer.max_epochs=1", "launch.sbatch=['--hold']"
    )
    foreign = cluster.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()

    cluster.until(lambda: rows(capsys)[job]["step"] > 3, "step 3", job)
    found = rows(capsys)
    assert found.keys() >= {job, held} and foreign not in found
    running = found[job]
    assert (running["state"], running["run"], running["max_steps"]) == ("RUNNING", str(folder), 900)
    assert running["loss"] == column(folder, "train/loss")[running["step"]]
    step_s = column(folder, "throughput/step_s")[running["step"]]
    assert running["end_s"] == pytest.approx((900 - running["step"]) * step_s) and 1200 < running["limit_s"] < 1800
    assert found[held]["where"] == "(JobHeldUser)" and found[held]["run"] == str(waiting)
    assert (found[held]["loss"], found[held]["limit_s"], found[held]["end_s"]) == (None, None, None)
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["jobs"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[0] == job)
    assert "/900 " in line and line.endswith(str(folder))

    for named in (str(folder), job):
        follower = launched(cache, shared, "jobs", "follow", named)
        assert follower.first_lines(1)
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=60)

    assert cli.main(["jobs", "requeue", str(folder)]) == 0
    attempts = folder / "attempts.json"
    cluster.until(lambda: len(json.loads(attempts.read_text())) == 2, "the second attempt", job)
    assert cli.main(["jobs", "cancel", str(folder), held]) == 0
    cluster.until(lambda: not rows(capsys).keys() & {job, held}, "no job in the table")
    assert rows(capsys, "--all")[held]["state"] == "CANCELLED"
    cluster.ask("scancel", foreign)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cancel"], "name a run"),
        (["requeue", "nowhere"], "nowhere: no folder or job that SLURM knows"),
        (["list", "a"], "lists all"),
        ([], "squeue: is not on this machine"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["jobs", *words]) == BadInputError.exit_code
    assert said in capsys.readouterr().err


def test_times_as_slurm_writes_them() -> None:
    assert [seconds(text) for text in ("1-02:03:04", "2:00:00", "59:07", "0:00")] == [93784, 7200, 3547, 0]
    assert all(math.isnan(seconds(text)) for text in ("UNLIMITED", "INVALID", "NOT_SET", ""))


def test_other_programs_jobs_are_left_out_and_of_two_of_a_run_the_newer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for squeue, which sorts by the states' names, and for scancel."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    (tmp_path / "points.txt").write_text(f"{run}\n")
    lines = [f"9_0|RUNNING|1:00|0|n0|{tmp_path}", "3|PENDING|1:00|N/A|(None)|/several\nlines"]
    lines.append(f"7_0|TIMEOUT|0:00|0|n0|{tmp_path}")
    (tmp_path / "jobs").write_text("\n".join(lines) + "\n")
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/jobs\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/cancelled\n')
    for tool in ("squeue", "scancel"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert rows(capsys, "--all").keys() == {"9_0", "7_0"}
    assert cli.main(["jobs", "cancel", str(run)]) == 0 and (tmp_path / "cancelled").read_text() == "9_0\n"


def test_no_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7|RUNNING|1:00|N/A|n0|/nowhere'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program = "import sys; from mgpu_pipe.cli.main import main; main(['jobs']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "0 jobs\n", done.stderr
