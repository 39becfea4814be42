"""What GPUs a process sees, steps without waits, and two GPUs together; dry on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Programs, sampled
from tests.runs.support import overrides, same

ALONE = {
    "launched": {},
    # As SLURM starts the fourth task of a node with --gpus-per-task=1.
    "one GPU a task": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"},
}
TOGETHER = {
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "zero2": ("strategy=zero2",),
    "zero3": ("strategy=zero3",),
    "tp": ("strategy=tp", "strategy.sequence_parallel=true"),
    "pp": ("strategy=pp",),
    "ring": ("strategy=cp",),
    "ulysses": ("strategy=cp", "strategy.context.method=ulysses"),
    "ep": ("strategy=ep", "model=mixtral_tiny"),
}
STEPS = {
    "eager": ("model.compile=false",),
    "recomputed": ("strategy.activation_checkpointing=selective",),
    "compiled": ("model.compile=true",),
    "compiled, fsdp": ("model.compile=true", "strategy=fsdp"),
    "zero1": ("strategy=zero1",),
}


@pytest.mark.slow
@pytest.mark.parametrize("started", list(ALONE))
def test_a_process_uses_the_gpu_that_it_is_shown(
    started: str, programs: Programs, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = str(max(0, torch.cuda.device_count() - 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if programs.dry else last)
    for name, value in ALONE[started].items():
        monkeypatch.setenv(name, value)
    folder = programs.on_gpu(*overrides(corpus, "trainer.max_steps=2", "trainer.val_every_n_steps=2"))
    seen = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert len(seen["gpus"]) == (0 if programs.dry else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(STEPS, "eager"))
def test_a_step_waits_once_and_nothing_is_compiled_after_the_first(name: str, programs: Programs, corpus: Path) -> None:
    """The host reads a step's loss and norm, and nothing else; documents of other lengths come with every step."""
    counted = programs.folder / "waits.json"
    counting = ("callbacks.waits._target_=tests.gpu.waits.CountWaits", f"callbacks.waits.file={counted}")
    short = ("trainer.max_steps=10", "precision=bf16", "data.seq_len=1024", "model.config.max_position_embeddings=1024")
    programs.on_gpu(*overrides(corpus, *short, *STEPS[name], *counting))
    waits, graphs = zip(*json.loads(counted.read_text(encoding="utf-8")), strict=True)
    assert graphs[-1] == graphs[0] and (graphs[0] > 0) == ("model.compile=true" in STEPS[name])
    assert set(waits[1:]) == {0 if programs.dry else 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TOGETHER, "fsdp"))
def test_two_gpus_train_as_one_cpu_process_does(name: str, programs: Programs, corpus: Path) -> None:
    if not programs.dry and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = tuple(entry for entry in TOGETHER[name] if entry.startswith("model="))
    programs.hold(
        overrides(corpus, *TOGETHER[name], "trainer.devices=2"), overrides(corpus, *model, "trainer.devices=1"), same
    )


@pytest.mark.slow
def test_a_gpu_that_does_not_come_is_named(programs: Programs, corpus: Path) -> None:
    """A collective that hangs ends the run within its timeout, and the rank that stays away is named."""
    if not programs.dry and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    late = ("callbacks.slow._target_=tests.support.slow.Slow", "callbacks.slow.seconds=600", "callbacks.slow.rank=1")
    said = programs.fails(
        *overrides(corpus, *late, "strategy=ddp", "trainer.devices=2", "launch.collective_timeout=10")
    )
    assert "waited in vain for rank 1 (at " in said and "slow.py" in said
