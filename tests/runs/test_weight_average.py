"""A run's moving average of the weights, from its checkpoint to the verbs that take it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.checks.optimizer import optimizer_errors
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.topology import ParallelDims
from tests.support.command import column, mgpu, run_folder


def tensor(reader: CheckpointReader, name: str, kind: str) -> torch.Tensor:
    shape = reader.shape(name)
    shard = LocalShard(TensorSlice.whole(name, shape), shape, torch.empty(shape))
    reader.read([shard], kind)
    return shard.tensor


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    out = capsys.readouterr()
    return out.err if code else out.out


@pytest.mark.slow
def test_the_average_is_saved_evaluated_and_exported(
    cache: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(cache))
    words = (
        "model=llama_tiny",
        "data=text_files",
        f"data.paths=[{corpus}/*.txt]",
        "data.seq_len=64",
        "data.global_batch_size=8",
        "data.validation_max_samples=8",
        "optimizer.lr=3e-3",
        "scheduler=constant",
        "model.freeze=['model.norm.weight']",
        "precision=fp32",
        "logger=none",
    )
    average = ("optimizer.ema.decay=0.5", f"run.dir={tmp_path}/run", "checkpoint.keep_last=0")
    more = ("trainer.max_steps=2", "checkpoint.every_n_steps=1", "optimizer.ema.evaluate=true")
    run = run_folder(mgpu(cache, tmp_path, *words, *average, *more))
    steps = [CheckpointReader(run / f"checkpoints/step-0000000{step}") for step in (1, 2)]
    names = [name for name in steps[0].names("model") if name != "model.norm.weight"]
    for name in names:
        first, second = (tensor(step, f"{name}/ema", "optimizer") for step in steps)
        torch.testing.assert_close(second, 0.5 * first + 0.5 * tensor(steps[1], name, "model"))
    assert "model.norm.weight/ema" not in steps[0].names("optimizer")
    said(capsys, "export", str(run), "--weights", "ema", "--out", f"{tmp_path}/out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    loaded = dict(load_run(run, average=True).model.named_parameters())
    for name in names:
        assert torch.equal(exported[name], tensor(steps[1], f"{name}/ema", "optimizer"))
        assert torch.equal(exported[name], loaded[name])
    for name in ("model.norm.weight",):
        assert torch.equal(exported[name], tensor(steps[1], name, "model"))
    evals = [said(capsys, "eval", str(run), *more).splitlines()[0] for more in ([], ["--weights", "ema"])]
    tokenizer = f"data.tokenizer={run}/tokenizer"
    of_export = said(capsys, "eval", f"{tmp_path}/out", *words[1:6], tokenizer).splitlines()[0]
    assert evals[1] == of_export != evals[0]
    assert abs(float(evals[1].split()[1]) / column(run, "val/loss")[2] - 1) < 1e-5, "evaluated in training"
    assert "holds no average" in said(capsys, "eval", f"{tmp_path}/out", "--weights", "ema", code=2)
    without = ("optimizer.ema.decay=null", "checkpoint.resume=auto", *average[1:], "trainer.max_steps=3")
    mgpu(cache, tmp_path, *words, *without)
    third = CheckpointReader(run / "checkpoints/step-00000003")
    assert not any(name.endswith("/ema") for name in third.names("optimizer"))
    refused = said(capsys, "export", str(run), "--weights", "ema", "--out", f"{tmp_path}/none", code=2)
    assert len(refused.splitlines()) == 1 and "optimizer.ema.decay=0.999" in refused


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.ema.decay=1", "optimizer.ema.decay=1.0: use a number below 1, or null to keep none"),
        ("optimizer.ema.decay=0", "use a number above 0, or null to keep none"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(override: str, told: str) -> None:
    with pytest.raises(BadInputError) as refused:
        preflight(compose([override])[0])
    assert told in str(refused.value)


def test_weights_that_are_on_a_disk_have_no_average() -> None:
    words = ["optimizer.ema.decay=0.9", "strategy=zero3_nvme", "strategy.offload_path=/disk", "trainer.devices=2"]
    config, _ = compose(words)
    (error,) = optimizer_errors(config.optimizer, config.strategy, config.trainer, ParallelDims(dp_shard=2))
    assert "optimizer.ema.decay=0.9: strategy.offload=nvme has a weight in memory" in str(error)
