"""The run folder's lock between real processes; another host is a lease file that names another boot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import RunFolderError
from mgpu_pipe.launch.outcome import conclude
from mgpu_pipe.launch.supervisor import Outcome
from mgpu_pipe.runs.lock import RunLock, boot_id

HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from mgpu_pipe.runs.lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], pass_fds=[lock.fd])
    print(os.getpid(), flush=True)
    time.sleep(float(sys.argv[3]))
"""


def hold(path: Path, worker: str = "pass", seconds: float = 600) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), worker, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def lease(path: Path, beat: int, **changes: object) -> None:
    """What a launcher of another host has in the lock file."""
    record = {"host": "node7", "pid": 4711, "boot": "another", "token": "t", "state": "running", "beat": beat}
    path.write_text(json.dumps({**record, **changes}))


def test_a_living_holder_is_named(tmp_path: Path) -> None:
    holder = hold(tmp_path / ".lock")
    try:
        with pytest.raises(RunFolderError, match=rf"is preparing in this folder \(process {holder.pid} on "):
            RunLock(tmp_path / ".lock").__enter__()
    finally:
        holder.kill()
        holder.wait()


def test_the_umask_decides_who_may_open_the_lock(tmp_path: Path) -> None:
    for umask in (0o002, 0o022, 0o077):
        usual = os.umask(umask)
        try:
            with RunLock(tmp_path / f"{umask}.lock"):
                assert (tmp_path / f"{umask}.lock").stat().st_mode & 0o777 == 0o666 & ~umask
        finally:
            os.umask(usual)


def test_the_lock_is_free_after_its_holder_left_or_died(tmp_path: Path) -> None:
    for stop in (lambda process: process.wait(), lambda process: process.kill()):
        holder = hold(tmp_path / ".lock", seconds=0.05)
        stop(holder)
        holder.wait()
        with RunLock(tmp_path / ".lock") as lock:
            assert not lock.loss_reason()


def test_a_resume_waits_for_the_workers_of_a_dead_launcher(tmp_path: Path) -> None:
    told: list[str] = []
    holder = hold(tmp_path / ".lock", worker="import time; time.sleep(1.5)")
    holder.kill()
    holder.wait()
    with RunLock(tmp_path / ".lock", tell=told.append):
        assert len(told) == 1
        assert f"process {holder.pid}" in told[0]


def test_the_wait_for_dying_workers_is_bounded(tmp_path: Path) -> None:
    holder = hold(tmp_path / ".lock", worker="import time; time.sleep(5)")
    holder.kill()
    holder.wait()
    with pytest.raises(RunFolderError, match="another launch is preparing in this folder"):
        RunLock(tmp_path / ".lock", wait_s=0.3, tell=lambda line: None).__enter__()


def test_a_lease_of_another_host_that_beats_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lease(path, 1)
    beats = threading.Timer(0.1, lease, (path, 2))
    beats.start()
    with pytest.raises(RunFolderError, match="process 4711 on node7"):
        RunLock(path, beat_s=0.2, tell=lambda line: None).__enter__()
    beats.join()


def test_a_lease_of_another_host_that_missed_its_beats_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lease(path, 9, time=time.time() + 1e6)  # a clock that is ahead does not matter
    with RunLock(path, beat_s=0.1, tell=lambda line: None):
        assert json.loads(path.read_text())["boot"] == boot_id()


def test_a_stopping_holder_on_another_host_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lease(path, 1, state="stopping")
    leaves = [
        threading.Timer(0.1, lease, (path, 2), {"state": "stopping"}),
        threading.Timer(0.3, path.write_text, ("",)),
    ]
    for timer in leaves:
        timer.start()
    with RunLock(path, beat_s=0.3, tell=lambda line: None):
        assert json.loads(path.read_text())["boot"] == boot_id()


def test_a_holder_notices_that_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with RunLock(path, beat_s=0.05) as lock:
        lease(path, 1)
        while not lock.loss_reason():
            time.sleep(0.01)
        assert "process 4711 on node7" in lock.loss_reason()
    assert "node7" in path.read_text()  # what is the other's is left alone


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("end", ["moved", "deleted"])
def test_a_holder_notices_that_its_folder_is_gone(end: str, ghost: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder / ".lock") as lock:
        assert not lock.loss_reason()
        if end == "moved":
            folder.rename(tmp_path / "other")
        else:
            shutil.rmtree(folder)
        if ghost:
            folder.mkdir()
        where = f"moved to {tmp_path / 'other'}" if end == "moved" else "deleted"
        assert lock.loss_reason() == f"{folder}: this run ends: its folder was {where}"


def test_nothing_is_written_where_a_folder_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root in (tmp_path / "gone", tmp_path / "ghost"):
        if root.name == "ghost":
            root.mkdir()
        conclude(RunConfig(), RunPaths(root), Outcome("failed", 1, 1, message="its folder was moved"), 1.0, "")
    assert list(tmp_path.rglob("*")) == [tmp_path / "ghost"]
    assert capsys.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunLock(tmp_path / "missing" / ".lock").__enter__()
