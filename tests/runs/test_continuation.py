"""Going on in the middle of an epoch with other micro-batches and loader processes. Oracle: the uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs.support import SHORT
from tests.support.command import column, mgpu, run_folder

pytestmark = pytest.mark.slow

BASE = (
    *SHORT,
    "checkpoint.every_n_steps=4",
    "checkpoint.keep_last=0",
    "trainer.max_steps=9",
    "model.config.num_hidden_layers=2",
    "precision=fp32",
    "optimizer.lr=3e-4",
    "strategy=ddp",
    "trainer.devices=2",
)
COLUMNS = ("train/loss", "train/grad_norm", "lr")


@pytest.fixture(scope="module")
def uninterrupted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_folder(mgpu(cache, tmp_path_factory.mktemp("whole"), *BASE, "data.micro_batch_size=4"))
    samples = json.loads((folder / "summary.json").read_text())["data"]["train_samples"]
    assert (4 * 8) % samples, "step 4 would end an epoch"
    return folder


def gone_on(cache: Path, cwd: Path, source: Path, step: int, *more: str) -> Path:
    return run_folder(mgpu(cache, cwd, *BASE, f"checkpoint.resume={source}/checkpoints/step-{step:08d}", *more))


def test_more_and_fewer_loader_processes_go_on_bit_for_bit(cache: Path, tmp_path: Path, uninterrupted: Path) -> None:
    more = gone_on(cache, tmp_path, uninterrupted, 4, "data.micro_batch_size=4", "data.num_workers=2")
    fewer = gone_on(cache, tmp_path, more, 8, "data.micro_batch_size=4", "data.num_workers=1")
    for name in COLUMNS:
        whole = column(uninterrupted, name)
        assert column(more, name) == {step: whole[step] for step in range(5, 10)}, name
        assert column(fewer, name) == {9: whole[9]}, name


def test_a_run_that_is_killed_before_its_first_step_goes_on_from_where_it_was_to_start(
    cache: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    more = ("data.micro_batch_size=4", "run.dir=more")
    began = gone_on(cache, tmp_path, uninterrupted, 4, *more)
    for _ in range(2):  # what a kill leaves, and what a second one does: no step, no row
        shutil.rmtree(began / "checkpoints")
        for name in ("metrics.csv", "summary.json"):
            (began / name).unlink()
        again = run_folder(mgpu(cache, tmp_path, *BASE, *more, "checkpoint.resume=auto"))
        for name in COLUMNS:
            whole = column(uninterrupted, name)
            assert column(again, name) == {step: whole[step] for step in range(5, 10)}, name


@pytest.mark.exhaustive
def test_another_micro_batch_size_goes_on_within_rounding(cache: Path, tmp_path: Path, uninterrupted: Path) -> None:
    folder = gone_on(cache, tmp_path, uninterrupted, 4, "data.micro_batch_size=1", "data.num_workers=2")
    for name in COLUMNS:
        whole, found = column(uninterrupted, name), column(folder, name)
        assert list(found) == [5, 6, 7, 8, 9]
        assert max(abs(found[step] / whole[step] - 1) for step in found) <= 1e-5, name


def test_more_steps_keep_the_schedules_horizon(cache: Path, tmp_path: Path, uninterrupted: Path) -> None:
    folder = gone_on(cache, tmp_path, uninterrupted, 8, "data.micro_batch_size=4", "trainer.max_steps=11")
    found = column(folder, "lr")
    assert found[9] == column(uninterrupted, "lr")[9], "the run's own horizon of 9 steps"
    assert found[10] == found[11] == pytest.approx(0.1 * 3e-4), "the end of the schedule"


def test_an_fp16_run_goes_on_with_its_loss_scale(cache: Path, tmp_path: Path) -> None:
    fp16 = [word for word in BASE if word != "precision=fp32" and "devices" not in word]
    fp16 += ["trainer.devices=1", "precision=fp16", "trainer.max_steps=6", "data.seq_len=16"]
    fp16 = [word for word in fp16 if word != "data.seq_len=32" and word != "trainer.max_steps=9"]
    whole = run_folder(mgpu(cache, tmp_path, *fp16))
    first = whole / "checkpoints" / "step-00000004"
    scale = json.loads((first / "state.json").read_text())["loss_scale"]
    assert scale["updates"] > 0
    folder = run_folder(mgpu(cache, tmp_path, *fp16, f"checkpoint.resume={first}"))
    for name in COLUMNS:
        assert column(folder, name) == {step: column(whole, name)[step] for step in (5, 6)}, name
    ends = [json.loads((path / "checkpoints/step-00000006/state.json").read_text()) for path in (whole, folder)]
    assert ends[0]["loss_scale"] == ends[1]["loss_scale"] != scale
