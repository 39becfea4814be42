"""Oracle: a planted error. The comparison passes every sharded strategy, and finds one rank's wrong gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.processes import run_processes
from tests.verify.support import small_run

pytestmark = pytest.mark.slow

TARGET = "model.layers.1.mlp.down_proj"
FSDP = ("strategy=fsdp",)
HSDP = ("strategy=hsdp", "strategy.dp_replicate=2")


def wrong_gradient(strategy: MeshStrategy) -> None:
    """Rank 1's gradient of one weight is 0.1 % too large, before it is reduced."""
    if dist.get_rank() != 1:
        return
    module = strategy.objective.model.get_submodule(TARGET)

    def on_first_forward(_: torch.nn.Module, __: Any) -> None:
        handle.remove()
        module.weight.register_hook(lambda gradient: gradient * 1.001)  # the gathered one

    handle = module.register_forward_pre_hook(on_first_forward)


def verified(config: RunConfig, planted: bool) -> list[Worst]:
    return worst_of(compare(config, on_start=wrong_gradient if planted else lambda strategy: None))


def broken(worst: list[Worst]) -> dict[str, Worst]:
    return {one.quantity: one for one in worst if not one.passed}


@pytest.mark.parametrize(
    "overrides",
    [
        FSDP,
        pytest.param(HSDP, marks=pytest.mark.exhaustive),
        (*FSDP, "data.micro_batch_size=2", "strategy.fsdp.reshard_after_forward=false"),
        pytest.param((*FSDP, "strategy.fsdp.reshard_after_forward=true"), marks=pytest.mark.exhaustive),
        pytest.param((*HSDP, "data.micro_batch_size=2"), marks=pytest.mark.exhaustive),
        pytest.param((*FSDP, "precision=fp16"), marks=pytest.mark.exhaustive),
        (*HSDP, "precision=bf16_true"),
        (*FSDP, "model.freeze=['model.embed_tokens.*']"),
    ],
)
def test_sharded_strategies_are_the_plain_computation(overrides: tuple[str, ...]) -> None:
    config = small_run("model=llama_tiny", "trainer.devices=4", *overrides)
    first, *_ = run_processes(4, verified, config, False)
    assert len(first) == 5
    assert broken(first) == {}


MIXTURE = ("model=mixtral_tiny", "objective.router_aux_loss=0.1", "trainer.devices=2")
STAGES = ("model=llama_tiny", "trainer.devices=2", "strategy=pp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (*MIXTURE, "strategy=tp", "strategy.sequence_parallel=true"),
        (*MIXTURE, "strategy=pp", "strategy.activation_checkpointing=full"),
        (*STAGES, "model.freeze=['model.embed_tokens.*','model.layers.0.*']"),
    ],
)
def test_the_axes_are_the_plain_computation(overrides: tuple[str, ...]) -> None:
    first, *_ = run_processes(2, verified, small_run(*overrides, steps=2), False)
    assert len(first) == 5
    assert broken(first) == {}


@pytest.mark.parametrize("overrides", [FSDP, HSDP])
def test_one_ranks_wrong_gradient_is_found(overrides: tuple[str, ...]) -> None:
    config = small_run("model=llama_tiny", "trainer.devices=4", *overrides)
    found = broken(run_processes(4, verified, config, True)[0])
    assert found["gradient"].where == f"{TARGET}.weight"


@pytest.mark.exhaustive  # tests/parallel/test_compile.py compares the same blocks
@pytest.mark.usefixtures("torch_compile")
def test_compiled_blocks_are_the_plain_computation() -> None:
    config = small_run(
        "model=llama_tiny",
        "trainer.devices=2",
        *FSDP,
        "model.compile=true",
        "strategy.activation_checkpointing=full",
        "trainer.max_steps=2",
    )
    assert config.model.compile
    assert broken(run_processes(2, verified, config, False)[0]) == {}
