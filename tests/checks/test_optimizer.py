"""What is said of an optimizer before any worker starts. Oracle: the program's own check, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks import optimizer as optimizer_check
from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.optim.probe import probe
from mgpu_pipe.topology import ParallelDims

OWN = "optimizer._target_=tests.support.own_optimizers."
PLAIN = "optimizer=sgd"  # without options
TENSOR, MODEL = "depends on the whole tensor", "depends on the other tensors"


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is tried, here without a process of its own."""
    found: list[str] = []

    def in_this_process(given: str) -> dict[str, Any]:
        found.append(given)
        return asdict(probe(**json.loads(given)))

    monkeypatch.setattr(optimizer_check, "_probe", in_this_process)
    return found


def refusals(*overrides: str) -> list[str]:
    config, _ = compose(["model=llama_tiny", "trainer.accelerator=cpu", "data.global_batch_size=8", *overrides])
    try:
        preflight(config)
    except ConfigErrors as errors:
        return [str(error) for error in errors.errors]
    return []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("optimizer.options.betas=[0.9]", "optimizer.options.betas=[0.9]: use a list of 2 values"),
        (
            "optimizer.options.betas=[0.9,2]",
            "optimizer.options.betas=[0.9, 2]: out of range; give two numbers of at least 0 and below 1, such as "
            "[0.9, 0.95], or leave it out",
        ),
        ("+optimizer.options.nesterov=true", "optimizer.options.nesterov=true: torch.optim.SGD refuses"),
        ("optimizer._target_=torch.optim.Muon", "use optimizer=muon"),
        ("optimizer._target_=torch.optim.SparseAdam", "SparseAdam does not support dense gradients"),
        ("optimizer=muon strategy=zero3 trainer.devices=2", "Muon needs whole matrices; use strategy=fsdp, or"),
        ("optimizer=muon optimizer.options.momentum=-1", "optimizer.options.momentum=-1: out of range; give a number"),
        (
            "optimizer=muon +optimizer.options.adjust_lr_fn=x",
            "adjust_lr_fn=x: out of range; give original, match_rms_adamw",
        ),
        (
            "optimizer=adamw_bf16 optimizer.options.betas=[0.9,0.999]",
            "bfloat16 loses a moment's decay; give two numbers of at least 0 and below 0.992",
        ),
        (OWN + "Noisy", "draws random numbers"),
        (OWN + "Early strategy=zero1 trainer.devices=2", "its constructor makes the state"),
        (OWN + "Counting strategy=zero3 trainer.devices=2", "it replaces the parameters' tensors"),
        *(
            (f"{OWN}ByNorm {strategy}", TENSOR)
            for strategy in (
                "strategy=fsdp trainer.devices=2",
                "strategy=tp trainer.devices=2",
                "strategy=cp trainer.devices=2",
                "strategy=zero1 trainer.devices=2",
                "strategy=zero3 trainer.devices=1",
            )
        ),
        ("optimizer._target_=torch.optim.Adafactor strategy=cp trainer.devices=2", TENSOR),
        (OWN + "Clipping strategy=pp trainer.devices=2", MODEL),
    ],
)
def test_what_would_fail_or_differ_is_refused_in_one_line(overrides: str, said: str) -> None:
    words = overrides.split()
    (line,) = refusals(*([] if "options.betas" in overrides or "optimizer=" in overrides else [PLAIN]), *words)
    assert said in line and line.startswith("optimizer.") and "\n" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        "optimizer._target_=torch.optim.Adafactor strategy=ddp trainer.devices=2",
        OWN + "Lion strategy=fsdp",
        OWN + "Clipping strategy=ddp trainer.devices=2",
        OWN + "ByNorm strategy=pp trainer.devices=2",
        OWN + "Lion strategy=zero3 trainer.devices=2",
        "optimizer._target_=torch.optim.Adagrad strategy=zero2",
    ],
)
def test_what_the_refusals_advise_is_accepted(overrides: str) -> None:
    assert refusals(PLAIN, *overrides.split()) == []


def test_state_in_bfloat16_is_not_swapped_to_the_disk() -> None:
    config, _ = compose(["optimizer=adamw_bf16", "strategy=zero3", "strategy.offload=nvme"])
    (error,) = optimizer_check.optimizer_errors(config.optimizer, config.strategy, config.trainer, ParallelDims())
    assert "DeepSpeed swaps state in fp32 alone to the disk; use strategy=zero3_cpu" in str(error)
    assert str(error).startswith("optimizer._target_=mgpu_pipe.optim.adamw_bf16.AdamWBf16: ")


@pytest.mark.slow
def test_shipped_optimizers_are_not_tried(tried: list[str]) -> None:
    for option in ("adamw", "adamw_bf16", "sgd", "muon"):
        assert refusals(f"optimizer={option}", "strategy=fsdp", "trainer.devices=2") == []
    assert tried == []


def test_the_command_ends_with_two_and_a_line(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mgpu_pipe", "model=llama_tiny", "optimizer.options.betas=[0.9]", "data=synthetic"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: optimizer.options.betas=[0.9]: ")
    assert not list(tmp_path.iterdir())
