"""The history of a job's attempts, as the next one completes it from what a killed one left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mgpu_pipe.checkpoint import layout
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.runs import history


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0")
    monkeypatch.setenv("PATH", str(tmp_path))  # no sinfo to ask
    (tmp_path / "logs").mkdir()
    return RunPaths(tmp_path)


def written(path: Path, text: str, ago_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - ago_s,) * 2)


def test_what_a_killed_attempt_lost_is_what_it_did_after_its_last_save(paths: RunPaths) -> None:
    """It was killed 600 s ago, at step 5, 40 s after it had saved step 3; its successor's workers write their logs."""
    step = layout.step_folder(paths.checkpoints, 3)
    history.begin(paths, 1, None, 2)
    entries = history.read(paths)
    entries[0]["started"] = time.time() - 700
    history._write(paths, entries)
    written(step / layout.MANIFEST, "{}", 640)
    written(paths.metrics, "step,train/loss\n3,1.0\n4,1.0\n5,1.0\n", 600)
    written(paths.rank_log(0), "the next attempt begins", 0)
    history.begin(paths, 2, step, 2)
    killed, now = history.read(paths)
    assert (killed["status"], killed["cause"], killed["step"], now["from_step"]) == ("failed", history.KILLED, 5, 3)
    assert killed["lost_s"] == pytest.approx(40, abs=1)


def test_a_run_that_only_crashes_ends(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for attempt in (1, 2):
        history.begin(paths, attempt, None, 1)
        history.end(paths, "failed", 0, "it crashes", retry=True)
    with pytest.raises(WorkerError, match=r"launch.max_restarts_without_progress=1: the last 2 attempts crashed"):
        history.begin(paths, 3, None, 1)


def test_a_run_whose_time_limit_leaves_no_step_ends(paths: RunPaths) -> None:
    cause = "SIGUSR1 (the time limit is near)"
    history.begin(paths, 1, None, 1)
    history.end(paths, "stopped", 0, cause, retry=False)
    history.check_progress(paths, 1)
    history.note_unbegun(paths, time.time(), "SIGTERM (preempted, requeued or cancelled)")
    for _ in range(2):
        history.check_progress(paths, 3)
        history.note_unbegun(paths, time.time(), cause)
        history.begin(paths, 1, None, 1)  # and killed: the next one notes it
    with pytest.raises(WorkerError, match="the time limit stopped the last 4 attempts before they took a step; raise"):
        history.check_progress(paths, 3)
    assert '"status": "failed"' in paths.summary.read_text()
    history.check_progress(paths, 4)


def test_another_job_of_the_run_begins_anew(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        history.note_unbegun(paths, time.time(), "SIGUSR1 (the time limit is near)")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    history.check_progress(paths, 0)


def test_the_time_of_a_run_is_that_of_all_its_attempts(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a job: 100 s, then one killed after 50 s, then one of 20 s."""
    monkeypatch.delenv("SLURM_JOB_ID")
    now = time.time()
    history.begin(paths, 1, None, 2, launched=now - 1000)
    history.end(paths, "stopped", 3, "SIGTERM", retry=False, wall_s=100.0)
    history.begin(paths, 2, None, 2, launched=now - 650)
    entries = history.read(paths)
    entries[-1]["started"] = now - 640
    history._write(paths, entries)
    written(paths.metrics, "step,train/loss\n3,1.0\n4,1.0\n", 600)
    assert history.wall_s(history.read(paths), history.last_sign(paths)) == pytest.approx(150, abs=20)
    history.begin(paths, 3, None, 2, launched=now - 30)
    entries = history.end(paths, "finished", 6, "", retry=False, wall_s=20.0)
    assert history.wall_s(entries) == pytest.approx(170, abs=20)
    assert [entry.get("job") for entry in entries] == [None] * 3


def test_a_run_that_begins_anew_in_a_folder_keeps_the_history_of_jobs_alone(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.note_unbegun(paths, time.time(), "SIGTERM (preempted, requeued or cancelled)")
    monkeypatch.delenv("SLURM_JOB_ID")
    history.begin(paths, 1, None, 2)
    history.end(paths, "failed", 0, "it crashed", retry=True)
    history.begin_anew(paths)
    assert [entry.get("job") for entry in history.read(paths)] == ["7"]
    paths.attempts.unlink()
    history.begin(paths, 1, None, 2)
    history.begin_anew(paths)
    assert not paths.attempts.exists()
