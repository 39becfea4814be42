"""Runs of one command, killed with SIGKILL at random instants: none lost, none different from the uninterrupted run.

``MGPU_PIPE_KILLS`` is the number of kills; ``MGPU_PIPE_KILLS_SEED`` another row of random instants.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.selection import newest_valid
from tests.runs.support import SHORT
from tests.support.command import metrics
from tests.support.tables import TOLD
from tests.support.worlds import JoinedRun

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("MGPU_PIPE_KILLS", "4"))
SEED = int(os.environ.get("MGPU_PIPE_KILLS_SEED", "0"))
STEPS, WORLD_SIZE = 40, 2
STARTING = 0.25
"""Share of kills before the first step of an attempt."""
COMMAND = (
    *SHORT,
    "strategy=ddp",
    "model.config.num_hidden_layers=2",
    "data.micro_batch_size=2",
    "optimizer.lr=3e-4",
    "trainer.accelerator=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.val_every_n_steps=25",
    "checkpoint.every_n_steps=2",
    "checkpoint.resume=auto",
    "launch.threads_per_worker=1",
    "trainer.deterministic=true",
)
COLUMNS = ("step", "train/loss", "train/grad_norm", "lr", "val/loss")

Facts = dict[str, object]


def rows(folder: Path) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in COLUMNS) for row in metrics(folder)]


def content(step: Path) -> Facts:
    """What a checkpoint holds, whoever wrote it and wherever it lies: hashes of its tensors, and its state."""
    state = json.loads((step / "state.json").read_text())
    state.pop("config_hash")  # the folder's name is in the configuration
    files = {name: record.sha256 for name, record in read_manifest(step).files.items() if name.endswith(".safetensors")}
    return {**files, "state": state}


@pytest.fixture(scope="module")
def start(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JoinedRun]:
    cwd = tmp_path_factory.mktemp("kills")

    def launch(folder: Path, *more: str) -> JoinedRun:
        return JoinedRun(WORLD_SIZE, cwd, cache, folder.with_suffix(".log"), *COMMAND, f"run.dir={folder}", *more)

    return launch


@dataclass(frozen=True)
class Uninterrupted:
    """Rows of metrics, every checkpoint's content by step, and how long training took."""

    rows: list[tuple[str, ...]]
    steps: dict[int, Facts]
    seconds: float


@pytest.fixture(scope="module")
def uninterrupted(start: Callable[..., JoinedRun], tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run = start(folder, "checkpoint.keep_last=0")
    wait_for_a_step(run, folder)
    began = time.monotonic()
    assert run.wait() == [0] * WORLD_SIZE, run.said()
    seconds = time.monotonic() - began
    steps = {int(path.name[5:]): content(path) for path in (folder / "checkpoints").iterdir()}
    assert sorted(steps) == list(range(2, STEPS + 1, 2))
    return Uninterrupted(rows(folder), steps, seconds)


def wait_for_a_step(run: JoinedRun, folder: Path) -> None:
    """Until this attempt has written a row of metrics, or ended."""
    file = folder / "metrics.csv"
    before = file.stat().st_size if file.exists() else 0
    deadline = time.monotonic() + 240
    while not run.ended and not (file.exists() and file.stat().st_size > before):
        before = min(before, file.stat().st_size) if file.exists() else 0  # a resume cuts rows
        assert time.monotonic() < deadline, run.said()[-3000:]
        time.sleep(0.005)


def test_no_kill_loses_or_changes_anything(
    start: Callable[..., JoinedRun], uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    expected_rows, expected = uninterrupted.rows, uninterrupted.steps
    chance = random.Random(SEED)
    kills = finished = partial = resumed = 0
    folder, newest, begun = tmp_path / "run-0", 0, False
    while kills < KILLS or begun:
        run, begun = start(folder), True
        if kills < KILLS:
            if chance.random() < STARTING:
                time.sleep(chance.uniform(0.0, 1.5))
            else:
                wait_for_a_step(run, folder)
                time.sleep(chance.uniform(0.0, uninterrupted.seconds / 3))
        if kills < KILLS and not run.ended:
            run.kill()
            kills += 1
            found = newest_valid(folder / "checkpoints", "stop", "full")
            step = found.step if found is not None else 0
            assert step >= newest, f"step {newest} was committed, and after kill {kills} step {step} is the newest"
            if found is not None:
                assert content(found.path) == expected[step], f"step {step} differs after kill {kills}"
                assert rows(folder)[:step] == expected_rows[:step], "a row came later than its checkpoint"
            partial += any(path.suffix for path in (folder / "checkpoints").glob("step-*"))
            resumed += newest > 0
            newest = step
            continue
        assert run.wait() == [0] * WORLD_SIZE, run.said()[-3000:]
        assert rows(folder) == expected_rows
        found = newest_valid(folder / "checkpoints", "stop", "full")
        assert found is not None and content(found.path) == expected[STEPS]
        finished += 1
        folder, newest, begun = tmp_path / f"run-{finished}", 0, False
    TOLD.append(
        f"{kills} kills over {finished} runs of {STEPS} steps: {partial} in the middle of a save, {resumed} of "
        "attempts that had resumed; none lost, none different"
    )
