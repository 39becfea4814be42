"""Whole runs as a user starts them. Oracles: the single-process run, and the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.launch.launching import alive
from tests.support.command import column, launched, metrics, mgpu, run_folder, start, wait_for_step, workers_of
from tests.support.sampling import sampled

pytestmark = pytest.mark.slow

BASE = (
    *("model=llama_tiny", "data=text_files", "precision=fp32", "optimizer.lr=3e-4", "data.seq_len=64"),
    *("data.validation_max_samples=24", "data.global_batch_size=24", "trainer.val_every_n_steps=5"),
    *("scheduler.warmup_steps=2", "logger=none"),
)


def overrides(corpus: Path, *more: str) -> list[str]:
    return [*BASE, f"data.paths=[{corpus}/*.txt]", *more]


def same(a: dict[int, float], b: dict[int, float], bound: float) -> None:
    assert a.keys() == b.keys()
    worst = max(abs(a[step] / b[step] - 1) for step in a)
    assert worst <= bound, worst


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty steps on four processes."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    return run_folder(mgpu(cache, cwd, *overrides(corpus, "strategy=ddp", "trainer.devices=4", "trainer.max_steps=30")))


@pytest.mark.parametrize(
    "more",
    sampled(
        [
            (("strategy=single", "data.micro_batch_size=3"),),
            (("strategy=ddp", "trainer.devices=2", "data.micro_batch_size=12"),),
        ],
        lambda more: "strategy=ddp" in more,
    ),
)
def test_any_strategy_and_micro_batch_give_one_result(
    cache: Path, corpus: Path, tmp_path: Path, uninterrupted: Path, more: tuple[str, ...]
) -> None:
    folder = run_folder(mgpu(cache, tmp_path, *overrides(corpus, "trainer.max_steps=30", *more)))
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        same(column(folder, name), column(uninterrupted, name), 1e-5)
    assert column(folder, "lr") == column(uninterrupted, "lr")


@pytest.mark.exhaustive
def test_padded_and_uneven_samples_too(cache: Path, corpus: Path, tmp_path: Path) -> None:
    padded = overrides(corpus, "data.packing=none", "trainer.max_steps=10", "data.seq_len=96")
    alone = run_folder(mgpu(cache, tmp_path, *padded, "strategy=single"))
    four = run_folder(mgpu(cache, tmp_path, *padded, "strategy=ddp", "trainer.devices=4", "data.micro_batch_size=2"))
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        same(column(four, name), column(alone, name), 1e-5)


@pytest.mark.exhaustive  # tests/launch/test_runs.py kills the real program, test_kills at random
def test_a_killed_run_goes_on_bit_for_bit(cache: Path, corpus: Path, tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "run"
    command = overrides(
        corpus,
        "strategy=ddp",
        "trainer.devices=4",
        "trainer.max_steps=30",
        f"run.dir={folder}",
        "checkpoint.every_n_steps=4",
        "checkpoint.resume=auto",
    )
    chance = random.Random(7)
    for at in (6, 17):
        process = launched(cache, tmp_path, *command)
        wait_for_step(folder, at, process)
        time.sleep(chance.uniform(0, 0.3))
        workers = workers_of(process)
        assert len(workers) == 4
        process.kill()
        deadline = time.monotonic() + 30
        while any(map(alive, workers)):
            assert time.monotonic() < deadline, "workers outlived their launcher"
            time.sleep(0.05)
    mgpu(cache, tmp_path, *command)
    for name in ("train/loss", "train/grad_norm", "val/loss", "lr"):
        assert column(folder, name) == column(uninterrupted, name), name
    assert [int(row["step"]) for row in metrics(folder)] == list(range(1, 31))
    # Complete: nothing to do, nothing changed.
    before = (folder / "metrics.csv").read_bytes()
    mgpu(cache, tmp_path, *command)
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_killed_worker_is_started_again_where_that_is_asked_for(
    cache: Path, corpus: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    folder = tmp_path / "run"
    process = launched(
        cache,
        tmp_path,
        *overrides(
            corpus,
            "strategy=ddp",
            "trainer.devices=4",
            "trainer.max_steps=30",
            f"run.dir={folder}",
            "checkpoint.every_n_steps=4",
            "launch.max_restarts=1",
        ),
    )
    wait_for_step(folder, 9, process)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    for name in ("train/loss", "train/grad_norm", "val/loss", "lr"):
        assert column(folder, name) == column(uninterrupted, name), name


def test_sigterm_saves_and_another_number_of_processes_goes_on(
    cache: Path, corpus: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    folder = tmp_path / "run"
    command = overrides(corpus, "strategy=ddp", "trainer.max_steps=30", f"run.dir={folder}")
    process = launched(cache, tmp_path, *command, "trainer.devices=4")
    wait_for_step(folder, 7, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert "stopping after this step and saving; Ctrl-C again leaves at once" in err
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["status"] == "stopped" and stopped["step"] < 30
    assert (folder / stopped["checkpoint"] / "manifest.json").exists()
    mgpu(cache, tmp_path, *command, "trainer.devices=3", "checkpoint.resume=auto")
    same(column(folder, "train/loss"), column(uninterrupted, "train/loss"), 1e-5)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.exhaustive
def test_multirun_trains_one_run_after_another(cache: Path, corpus: Path, tmp_path: Path) -> None:
    out = mgpu(
        cache,
        tmp_path,
        "-m",
        *overrides(corpus, "strategy=ddp", "trainer.devices=1,2", "optimizer.lr=1e-3,3e-4", "trainer.max_steps=4"),
    )
    folders = sorted((tmp_path / "outputs" / "run").iterdir())
    assert len(folders) == 4
    losses = [column(folder, "train/loss")[4] for folder in folders]
    assert len({round(loss, 4) for loss in losses}) == 2, "two learning rates, each the same on one and two processes"
    assert all(folder.name in out for folder in folders)


def test_a_nan_stops_the_run_before_the_update(cache: Path, corpus: Path, tmp_path: Path) -> None:
    out = mgpu(
        cache,
        tmp_path,
        *overrides(
            corpus,
            "strategy=ddp",
            "trainer.devices=2",
            "trainer.max_steps=30",
            "optimizer.lr=1e18",
            "trainer.gradient_clip_val=null",
            "scheduler=constant",
            "checkpoint.every_n_steps=1",
            "launch.max_restarts=2",
        ),
        code=1,
    )
    assert "is not finite at step" in out and "samples" in out and "no good checkpoint precedes it" in out
    assert out.count("is not finite") == 1, "a NaN is not tried again"
    assert os.listdir(tmp_path / "outputs" / "run")


@pytest.mark.exhaustive
def test_a_disk_that_takes_no_more_stops_the_run_in_one_line(cache: Path, corpus: Path, tmp_path: Path) -> None:
    mgpu(cache, tmp_path, *overrides(corpus, "trainer.max_steps=2"))  # tokenises, which the limit would forbid
    command = overrides(corpus, f"run.dir={tmp_path / 'run'}", "trainer.max_steps=2")
    process = start(
        cache, tmp_path, *command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, out + err
    assert err.count("error: ") == 1 and "could not be written" in err and "Traceback" not in err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert list(column(tmp_path / "run", "train/loss")) == [1, 2]
