"""Checkpoints that leave out frozen weights, as a user meets them. Oracle: the same run with all weights saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import list_steps
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.open import open_model
from tests.runs.support import overrides, same
from tests.support.command import mgpu, run_folder

pytestmark = pytest.mark.slow

FROZEN = "model.layers.*.mlp.*"


def _tuning(corpus: Path, base: Path, *more: str) -> list[str]:
    settings = ("model=hf", f"model.path={base}", f"model.freeze=[{FROZEN}]", "trainer.max_steps=6")
    horizon = ("scheduler.total_steps=6", "trainer.val_every_n_steps=3", "checkpoint.every_n_steps=3")
    return overrides(corpus, *settings, *horizon, *more)


def _weights(cache: Path, run: Path, out: Path, *more: str) -> dict[str, torch.Tensor]:
    mgpu(cache, out.parent, "export", str(run), "--out", str(out), *more)
    return load_file(out / "model.safetensors")


def test_frozen_weights_that_are_left_out(cache: Path, corpus: Path, base: Path, tmp_path: Path) -> None:
    saved = run_folder(mgpu(cache, tmp_path, *_tuning(corpus, base)))
    leaving = _tuning(corpus, base, "checkpoint.frozen_weights=leave_out", f"run.dir={tmp_path / 'left'}")
    mgpu(cache, tmp_path, *leaving, "strategy=fsdp", "trainer.devices=2", "trainer.max_steps=3")
    other = ("strategy=tp", "trainer.devices=2", "checkpoint.resume=auto")
    left = run_folder(mgpu(cache, tmp_path, *leaving, *other))
    same(left, saved)

    steps = [list_steps(run / "checkpoints")[0].path for run in (saved, left)]
    whole, rest = (CheckpointReader(step) for step in steps)
    frozen = [name for name in whole.names("model") if ".mlp." in name]
    assert rest.left_out is not None and list(rest.left_out.names) == frozen
    assert rest.names("model") == [name for name in whole.names("model") if name not in frozen]

    # Exported, the two are one model, and its frozen weights are the folder's to the bit.
    mine, truth, given = (
        _weights(cache, left, tmp_path / "mine"),
        _weights(cache, saved, tmp_path / "truth"),
        load_file(base / "model.safetensors"),
    )
    assert mine.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(mine[name], given[name]) == (name in frozen), name
    reached = [float(mgpu(cache, tmp_path, "eval", str(run)).split()[1]) for run in (left, saved)]
    assert abs(reached[0] / reached[1] - 1) < 1e-5

    # The folder has gone, and another has come; a copy is as good.
    moved = base.rename(base.with_name("moved"))
    try:
        gone = mgpu(cache, tmp_path, "eval", str(left), code=2)
        assert f"leaves out its frozen weights, and {base} is gone; give a copy by --frozen-weights" in gone
        again = _weights(cache, left, tmp_path / "again", "--frozen-weights", str(moved))
        assert all(torch.equal(mine[name], again[name]) for name in mine)
        shutil.copytree(tmp_path / "truth", base)
        frozen_ones = "leaves out 12 frozen weights, and those of"
        assert frozen_ones in mgpu(cache, tmp_path, "eval", str(left), code=2)
        assert frozen_ones in mgpu(cache, tmp_path, *leaving, *other, "trainer.max_steps=7", code=2)
        shutil.rmtree(base)
    finally:
        moved.rename(base)

    # Trained once, frozen now: what a checkpoint holds is saved again.
    onward = ("checkpoint.frozen_weights=leave_out", f"checkpoint.resume={saved}", f"run.dir={tmp_path / 'onward'}")
    frozen_later = ("model.freeze=[model.layers.*]", "trainer.max_steps=7", "trainer.val_every_n_steps=null")
    later = run_folder(mgpu(cache, tmp_path, *_tuning(corpus, base, *onward, *frozen_later)))
    assert CheckpointReader(list_steps(later / "checkpoints")[0].path).left_out is None


@pytest.mark.parametrize("verb", [("eval",), ("export", "--out", "out")])
def test_a_folder_that_nothing_needs_is_refused(
    verb: tuple[str, ...], cache: Path, alone: Path, base: Path, tmp_path: Path
) -> None:
    for source in (alone, base):
        told = mgpu(cache, tmp_path, verb[0], str(source), *verb[1:], "--frozen-weights", str(base), code=2)
        assert "leaves no weights out; leave the option out" in told


def test_somebody_elses_run_names_no_folder(
    cache: Path, corpus: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = _tuning(corpus, base, "checkpoint.frozen_weights=leave_out", "trainer.max_steps=1")
    run = run_folder(mgpu(cache, tmp_path, *tuning))
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "another users cache"))
    with pytest.raises(BadInputError, match="may name no folder; give the one that it means by --frozen-weights"):
        open_model(run)
    assert open_model(run, base).read("model.layers.0.mlp.up_proj.weight", torch.float32).shape == (192, 64)
