"""Liger's kernels: when they are taken, and that they compute what torch does, run by Triton's interpreter on the CPU.
Oracle: the plain model in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu_pipe.checks.devices import numerics_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models.kernels import layers as liger
from mgpu_pipe.models.kernels.layers import FAMILIES, resolve_kernels
from mgpu_pipe.parallel.compile import compiles

ROOT = Path(__file__).parents[2]
ERROR = 1e-5
OTHERS = sorted(set(FAMILIES) - {"llama", "qwen3", "mistral"})
ASKED = "model.kernels=liger: "
EVERY_AXIS = (
    *("strategy=ddp", "strategy=fsdp strategy.activation_checkpointing=full"),
    *("strategy=tp strategy.sequence_parallel=true", "strategy=cp", "strategy=pp", "strategy=zero3"),
)


def interpreted(program: str, *words: str) -> dict[str, Any]:
    """What a program of this folder prints; in the interpreter, which is chosen before Triton is imported."""
    for package in ("liger_kernel", "triton"):
        name = package.replace("_", "-")
        pytest.importorskip(package, reason=f"Liger's kernels run in Triton's interpreter: pip install {name}")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{program}", *words],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def ran_right(told: dict[str, Any], model_type: str) -> None:
    assert told["loss"] <= ERROR and told["gradient"] <= ERROR, (model_type, told)
    forward = {name.removesuffix("_forward_kernel") for name in told["calls"] if name.endswith("_forward_kernel")}
    glu = {("silu", "swish"): {"_swiglu"}, ("gelu_pytorch_tanh",): {"_geglu_tanh"}, (): set()}[FAMILIES[model_type]]
    assert forward == {"_rms_norm", *glu}
    assert told["calls"]["_triton_rope"] == 4, "both ways in two layers"


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_plain_model() -> None:
    for model_type, told in interpreted("liger_steps", "llama", "qwen3", "mistral").items():
        ran_right(told, model_type)


@pytest.mark.exhaustive
def test_of_every_family() -> None:
    for model_type, told in interpreted("liger_steps", *OTHERS).items():
        ran_right(told, model_type)


@pytest.mark.slow
def test_blocks_may_be_computed_again() -> None:
    told = interpreted("liger_steps", "llama", "--checkpoint", "full")["llama"]
    assert told["loss"] <= ERROR and told["gradient"] <= ERROR
    assert told["calls"]["_triton_rope"] == 6


@pytest.mark.slow
def test_a_run_trains_by_them_and_says_so(tmp_path: Path) -> None:
    told = interpreted("liger_run", str(tmp_path))
    assert told["auto"]["kernels"] == "torch" and told["auto"]["calls"] == {}
    assert told["liger"]["kernels"] == "liger" and told["liger"]["calls"]["_swiglu_backward_kernel"] == 4
    assert told["liger"]["loss"] == pytest.approx(told["auto"]["loss"], rel=ERROR)


@pytest.mark.exhaustive
def test_under_every_axis() -> None:
    runs = [f"model=llama_tiny trainer.devices=2 {strategy}" for strategy in EVERY_AXIS]
    for overrides, told in interpreted("liger_strategies", *runs).items():
        assert told["over"] == [] and all(told["calls"]), overrides


@pytest.mark.slow
@pytest.mark.parametrize("how", [("--checkpoint", "selective"), ("--twice",)], ids=["selective", "twice"])
def test_what_is_refused_is_wrong(how: tuple[str, ...]) -> None:
    """So that a refusal goes when Liger's kernels no longer write over what they are given."""
    assert interpreted("liger_steps", "llama", *how)["llama"]["gradient"] > 0.1


def config_of(*overrides: str) -> RunConfig:
    return compose(["model=llama_tiny", *overrides])[0]


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Only these are found by the choice."""
    finder = SimpleNamespace(find_spec=lambda name: name if name in packages else None)
    monkeypatch.setattr(liger, "PathFinder", finder)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU, Liger's package, Triton and a C compiler, as far as the choice looks at it."""
    installed(monkeypatch, "liger_kernel")
    monkeypatch.setattr(liger, "device_type", lambda trainer: trainer.accelerator.replace("auto", "cuda"))
    monkeypatch.setattr(liger, "gpu_kernels_compile", lambda: True)
    return monkeypatch


def chosen(*overrides: str, model_type: str = "llama") -> str:
    config = config_of(*overrides)
    return resolve_kernels(config.model, config.strategy, config.precision, config.trainer, model_type)


def refusals(*overrides: str) -> list[str]:
    errors = numerics_errors(config_of("model.kernels=liger", *overrides))
    return [str(error) for error in errors if str(error).startswith(ASKED)]


@pytest.mark.slow
def test_auto_takes_them_where_they_can_run(gpu: pytest.MonkeyPatch) -> None:
    assert chosen() == chosen("strategy=zero3") == chosen("strategy=pp") == chosen("model.compile=false") == "liger"
    assert chosen("strategy=tp", "strategy.sequence_parallel=true") == "liger"
    assert chosen("model.kernels=torch") == "torch"
    assert chosen(model_type="gpt2") == "torch"
    assert chosen("trainer.accelerator=cpu") == "torch"
    assert chosen("model.compile=true") == chosen("precision=fp8") == "torch"
    assert chosen("strategy.activation_checkpointing=selective") == "torch"
    assert chosen("strategy=pp", "strategy.pipeline.schedule=zbv") == "torch"
    installed(gpu)
    assert chosen() == "torch" and refusals("model.kernels=auto") == refusals("model.kernels=torch") == []


def test_asked_for_they_keep_auto_from_compiling(gpu: pytest.MonkeyPatch) -> None:
    import torch

    from mgpu_pipe.parallel import compile as compilation

    gpu.setattr(compilation, "gpu_kernels_compile", lambda: True)
    for words, expected in ((), True), (("model.kernels=liger",), False):
        config, device = config_of(*words), torch.device("cuda")
        assert compiles(config.model, config.strategy, config.precision, device, 200_000_000) is expected


@pytest.mark.slow
def test_where_they_cannot_run_the_start_is_refused(gpu: pytest.MonkeyPatch) -> None:
    assert refusals() == []
    otherwise = "; use auto or torch"
    assert refusals("trainer.accelerator=cpu") == [f"{ASKED}they run on GPUs, and the run uses none{otherwise}"]
    (family,) = refusals("model=gpt2_tiny")
    assert family.startswith(f"{ASKED}they are not for gpt2, but for exaone4, gemma, ") and family.endswith(otherwise)
    assert refusals("model.compile=true") == [
        f"{ASKED}model.compile=true fuses the same by itself{otherwise}, or model.compile=auto or false"
    ]
    assert refusals("precision=fp8") == [
        f"{ASKED}float8 products pay off in compiled blocks alone{otherwise}, or precision=bf16"
    ]
    assert refusals("strategy.activation_checkpointing=selective") == [
        f"{ASKED}they write into the products that strategy.activation_checkpointing=selective keeps{otherwise}, or "
        "strategy.activation_checkpointing=full or none"
    ]
    assert refusals("strategy=pp", "strategy.pipeline.schedule=zbv") == [
        f"{ASKED}strategy.pipeline.schedule=zbv goes back through a block twice, which they allow once{otherwise}, or "
        "strategy.pipeline.schedule=1f1b"
    ]
    gpu.setattr(liger, "gpu_kernels_compile", lambda: False)
    assert refusals() == [
        f"{ASKED}Triton or the C compiler that it starts is missing; install triton and gcc, or use auto or torch"
    ]
    installed(gpu)
    assert refusals() == [
        f"{ASKED}the package liger-kernel is not installed; install it (pip install liger-kernel), or use auto or torch"
    ]
