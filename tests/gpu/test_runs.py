"""Whole runs on a GPU against those of one CPU process; tests/runs is their dry form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.support import overrides, same
from tests.support.command import column, metrics, mgpu_anew, run_folder, start, wait_for_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STRATEGIES = {
    "single": (),
    "ddp": (),
    "fsdp": (),
    "fsdp, offloaded": ("strategy=fsdp", "strategy.offload=cpu"),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "zero3_cpu": (),
    "unpacked": ("data.packing=none",),
    "recomputed": ("strategy.activation_checkpointing=selective",),
    "compiled": ("model.compile=true",),
    "mixtral": ("model=mixtral_tiny", "trainer.deterministic=true"),
}
SHORT = {
    "bf16": ("precision=bf16",),
    "bf16, compiled": ("precision=bf16", "model.compile=true"),
    "bf16, fsdp": ("precision=bf16", "strategy=fsdp"),
    "bf16, zero2": ("precision=bf16", "strategy=zero2"),
    "bf16, zero3": ("precision=bf16", "strategy=zero3"),
    "bf16, unpacked": ("precision=bf16", "data.packing=none"),
    "fp16, fsdp": ("precision=fp16", "strategy=fsdp"),
    "fp8": ("precision=fp8",),
}
REPEATED = {
    "fp32": ("precision=fp32",),
    "bf16, compiled": ("precision=bf16", "model.compile=true"),
    "bf16, fsdp": ("precision=bf16", "strategy=fsdp"),
    "bf16, mixtral": ("precision=bf16", "model=mixtral_tiny"),
    "bf16, zero3": ("precision=bf16", "strategy=zero3"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_in_fp32_is_that_of_one_cpu_process(name: str, cache: Path, corpus: Path, tmp_path: Path) -> None:
    chosen = STRATEGIES[name] or (f"strategy={name}",)
    on_cpu = tuple(entry for entry in chosen if entry.startswith(("data.", "model=")))
    truth = run_folder(mgpu_anew(cache, tmp_path, *overrides(corpus, "trainer.accelerator=cpu", *on_cpu)))
    same(run_folder(mgpu_anew(cache, tmp_path, *overrides(corpus, "trainer.accelerator=gpu", *chosen))), truth)


@pytest.mark.parametrize("name", SHORT)
def test_shorter_types_stay_close_to_fp32(name: str, cache: Path, corpus: Path, tmp_path: Path) -> None:
    on_cpu = tuple(entry for entry in SHORT[name] if entry.startswith("data."))
    truth = run_folder(mgpu_anew(cache, tmp_path, *overrides(corpus, "trainer.accelerator=cpu", *on_cpu)))
    mine = run_folder(mgpu_anew(cache, tmp_path, *overrides(corpus, "trainer.accelerator=gpu", *SHORT[name])))
    for metric, bound in (("train/loss", 2e-3), ("train/grad_norm", 3e-2 if name == "fp8" else 1e-2)):
        found, wanted = column(mine, metric), column(truth, metric)
        assert max(abs(found[step] / wanted[step] - 1) for step in wanted) < bound, metric


@pytest.mark.parametrize("name", REPEATED)
def test_a_killed_run_goes_on_bit_for_bit(name: str, cache: Path, corpus: Path, tmp_path: Path) -> None:
    wanted = (
        "trainer.accelerator=gpu",
        "trainer.deterministic=true",
        "checkpoint.every_n_steps=5",
        "trainer.max_steps=40",
        *REPEATED[name],
    )
    whole = run_folder(mgpu_anew(cache, tmp_path, *overrides(corpus, *wanted)))
    killed = (*overrides(corpus, *wanted), f"run.dir={tmp_path / 'killed'}", "checkpoint.resume=auto")
    process = start(cache, tmp_path, *killed)
    wait_for_step(tmp_path / "killed", 12, process)
    process.kill()
    process.communicate()
    folder = run_folder(mgpu_anew(cache, tmp_path, *killed))

    def rows(of: Path) -> list[tuple[str, ...]]:
        return [
            tuple(row[name] for name in ("step", "train/loss", "train/grad_norm", "val/loss")) for row in metrics(of)
        ]

    assert rows(folder) == rows(whole)
