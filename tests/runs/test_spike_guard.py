"""Runs with a guard at spikes of the gradient norm: skipped, or stopped and gone on with. Oracle: the skipping run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.checks.optimizer import optimizer_errors
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.topology import ParallelDims
from tests.support.command import column, mgpu, run_folder


def test_a_run_that_stopped_at_a_spike_goes_on_past_it(cache: Path, corpus: Path, tmp_path: Path) -> None:
    words = (
        "model=llama_tiny",
        "data=text_files",
        f"data.paths=[{corpus}/*.txt]",
        "data.seq_len=64",
        "data.global_batch_size=4",
        "data.validation_fraction=0",
        "precision=fp32",
        "logger=none",
        "trainer.max_steps=12",
        "optimizer.spike_guard.factor=1",
        "optimizer.spike_guard.window=2",
    )
    skips = run_folder(mgpu(cache, tmp_path, *words, "run.dir=skips"))
    skipped = list(column(skips, "train/skipped"))
    assert skipped and skipped[0] > 2
    first = skipped[0]
    stop = ("optimizer.spike_guard.action=stop", "run.dir=stops")
    out = mgpu(cache, tmp_path, *words, *stop, "strategy=ddp", "trainer.devices=2", code=1)
    (line,) = [line for line in out.splitlines() if line.startswith("error:")]
    assert f"the gradient norm of step {first} is" in line and f"stops/checkpoints/step-{first - 1:08d};" in line, line
    assert (tmp_path / "stops" / "checkpoints" / f"step-{first - 1:08d}" / "manifest.json").exists()
    went_on = run_folder(mgpu(cache, tmp_path, *words, "run.dir=stops", "checkpoint.resume=auto"))
    assert list(column(went_on, "train/skipped")) == skipped
    for name in ("train/loss", "train/grad_norm"):
        one, other = column(went_on, name), column(skips, name)
        assert one.keys() == other.keys() and max(abs(one[step] / other[step] - 1) for step in one) < 1e-5


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.spike_guard.factor=0.5", "use a number of at least 1, or null to take every step"),
        ("optimizer.spike_guard.window=1", "optimizer.spike_guard.window=1: use a number of at least 2"),
        ("optimizer.spike_guard.action=wait", "optimizer.spike_guard.action=wait: use one of skip, stop"),
    ],
)
def test_a_guard_that_cannot_be_is_refused(override: str, told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        preflight(compose([override])[0])
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_updates_that_are_on_a_disk_are_not_skipped() -> None:
    disk = ["strategy=zero3_nvme", "strategy.offload_path=/disk", "trainer.devices=2"]
    config = compose(["optimizer.spike_guard.factor=3", *disk])[0]
    (error,) = optimizer_errors(config.optimizer, config.strategy, config.trainer, ParallelDims(dp_shard=2))
    assert "optimizer.spike_guard.action=skip: strategy.offload=nvme" in str(error)
    config.optimizer.spike_guard.action = "stop"
    assert not optimizer_errors(config.optimizer, config.strategy, config.trainer, ParallelDims(dp_shard=2))
