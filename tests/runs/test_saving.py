"""Whole runs that save beside training: the same checkpoints, on a slow disk, on a full one, and when stopped.

Oracle: the run that waits for each of its saves (``checkpoint.async_save=false``).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_pipe.checkpoint.selection import newest_valid
from tests.runs.support import SHORT, steps_of
from tests.runs.test_kills import content, rows
from tests.support.worlds import JoinedRun

pytestmark = pytest.mark.slow

STEPS = 12
COMMAND = (
    *SHORT,
    "strategy=ddp",
    "model.config.num_hidden_layers=2",
    "optimizer.lr=3e-4",
    "trainer.accelerator=cpu",
    f"trainer.max_steps={STEPS}",
    "checkpoint.every_n_steps=3",
    "checkpoint.keep_last=0",
    "checkpoint.resume=auto",
    "launch.threads_per_worker=1",
    "trainer.progress=lines",
)
SLOW = ("+callbacks.disk._target_=tests.support.disk.SlowDisk", "+callbacks.disk.seconds=0.08")
FULL = ("+callbacks.disk._target_=tests.support.disk.FullDisk", "+callbacks.disk.steps=[6]", "+callbacks.disk.rank=1")

Start = Callable[..., JoinedRun]


@pytest.fixture(scope="module")
def start(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    cwd = tmp_path_factory.mktemp("saving")

    def launch(folder: Path, *more: str) -> JoinedRun:
        return JoinedRun(2, cwd, cache, folder.with_suffix(".log"), *COMMAND, f"run.dir={folder}", *more)

    return launch


@pytest.fixture(scope="module")
def waiting(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for each of its saves."""
    folder = tmp_path_factory.mktemp("waiting") / "run"
    run = start(folder, "checkpoint.async_save=false")
    assert run.wait() == [0, 0], run.said()
    assert steps_of(folder) == [3, 6, 9, 12]
    return folder


def compare(folder: Path, waiting: Path) -> None:
    """The same rows, and the same content of every checkpoint that both have."""
    assert rows(folder) == rows(waiting)
    for step in steps_of(folder):
        name = f"checkpoints/step-{step:08d}"
        if (waiting / name).exists():  # a stop saves its own step besides
            assert content(folder / name) == content(waiting / name), step


def test_saving_beside_training_gives_the_same_checkpoints(start: Start, waiting: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", SLOW[0], "+callbacks.disk.seconds=0.02")
    assert run.wait() == [0, 0], run.said()
    assert steps_of(tmp_path / "run") == [3, 6, 9, 12]
    compare(tmp_path / "run", waiting)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]) == ("finished", "checkpoints/step-00000012")


@pytest.mark.exhaustive
def test_on_a_slow_disk_saves_are_left_out_as_asked_but_never_the_last(
    start: Start, waiting: Path, tmp_path: Path
) -> None:
    run = start(tmp_path / "run", *SLOW, "checkpoint.when_busy=skip", "checkpoint.every_n_steps=1")
    assert run.wait() == [0, 0], run.said()
    assert "is left out: the one before is still being written" in run.said()
    assert steps_of(tmp_path / "run")[-1] == STEPS and len(steps_of(tmp_path / "run")) < STEPS
    assert rows(tmp_path / "run") == rows(waiting)


def test_a_full_disk_in_the_middle_of_a_save_stops_the_run(start: Start, waiting: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", *FULL)
    assert run.wait() == [1, 1], run.said()
    assert "step 6 could not be written" in run.said() and "No space left on device" in run.said()
    assert "the last good one is" in run.said() and "checkpoint.resume=auto" in run.said()
    assert steps_of(tmp_path / "run") == [3]
    again = start(tmp_path / "run")
    assert again.wait() == [0, 0], again.said()
    compare(tmp_path / "run", waiting)
    assert steps_of(tmp_path / "run") == [3, 6, 9, 12]


def test_or_the_run_goes_on_with_a_loud_warning(start: Start, waiting: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "run", *FULL, "checkpoint.on_save_error=continue")
    assert run.wait() == [0, 0], run.said()
    assert "WARNING: the checkpoint of step 6 could not be written" in run.said()
    assert "No space left on device" in run.said()
    assert steps_of(tmp_path / "run") == [3, 9, 12]
    compare(tmp_path / "run", waiting)


def wait_for_a_partial(run: JoinedRun, folder: Path) -> None:
    deadline = time.monotonic() + 240
    while not list(folder.glob("checkpoints/*.partial/*.safetensors")):
        assert not run.ended and time.monotonic() < deadline, run.said()
        time.sleep(0.01)


def test_a_stop_waits_for_the_save_and_a_second_one_leaves_the_last_good_one(
    start: Start, waiting: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start(folder, *SLOW)
    wait_for_a_partial(run, folder)
    run.signal(signal.SIGTERM)
    assert run.wait() == [75, 0] and "recvValue failed" not in run.said(), run.said()
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["status"] == "stopped" and not list(folder.glob("checkpoints/*.partial"))
    found = newest_valid(folder / "checkpoints", "stop", "full")
    assert found is not None and found.step == stopped["step"] == len(rows(folder))

    again = start(folder, *SLOW)
    wait_for_a_partial(again, folder)
    again.signal(signal.SIGTERM)
    time.sleep(0.5)  # later than one request that is delivered twice
    again.signal(signal.SIGTERM)
    assert set(again.wait()) <= {0, 1, 75, -signal.SIGTERM}
    found = newest_valid(folder / "checkpoints", "stop", "full")
    assert found is not None and found.step >= stopped["step"]

    last = start(folder)
    assert last.wait() == [0, 0], last.said()
    compare(folder, waiting)
