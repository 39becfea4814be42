"""Oracle: planted errors. The comparison of ZeRO has to find each and name it, and find nothing where there is none."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.verify.support import small_run
from tests.verify.test_comparison import TARGET, broken, verified

pytestmark = pytest.mark.slow


def wrong_gradient(strategy: EngineStrategy) -> None:
    if dist.get_rank() == 1:
        parameter = dict(strategy.objective.model.named_parameters())[TARGET]
        parameter.register_hook(lambda gradient: gradient * 1.001)


def wrong_master(strategy: EngineStrategy) -> None:
    """An error in the weights that one rank holds for all."""
    shards = [shard for shard in strategy.model_shards() if shard.tensor_slice.name == TARGET]
    if dist.get_rank() == 1:
        shards[0].tensor.view(-1)[0] += 1e-8


PLANTED = {"gradient": wrong_gradient, "master": wrong_master}


def planted(config: RunConfig, kind: str) -> list[Worst]:
    return worst_of(compare(config, on_start=PLANTED[kind]))


@pytest.mark.parametrize(
    "preset",
    [
        "zero1",
        pytest.param("zero2", marks=pytest.mark.exhaustive),
        "zero3",
        pytest.param("zero3_cpu", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("model", ["llama_tiny", pytest.param("gpt2_tiny", marks=pytest.mark.exhaustive)])
def test_zero_is_the_plain_computation(model: str, preset: str) -> None:
    config = small_run(f"model={model}", f"strategy={preset}", "trainer.devices=4", "data.micro_batch_size=4")
    first, *_ = run_processes(4, verified, config)
    assert [one.quantity for one in first] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert broken(first) == {}


def counted(config: RunConfig) -> tuple[list[Worst], int]:
    """The comparison, and how often a block's activation function was computed."""
    calls: list[int] = []

    def watch(strategy: EngineStrategy) -> None:
        module = strategy.objective.model.get_submodule("model.layers.0.mlp.act_fn")
        module.register_forward_hook(lambda *_: calls.append(1))

    return worst_of(compare(config, on_start=watch)), len(calls)


@pytest.mark.parametrize("preset", [pytest.param("zero1", marks=pytest.mark.exhaustive), "zero3"])
@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("full", 2), ("selective", 2)])
def test_blocks_are_checkpointed(preset: str, mode: str, times: int) -> None:
    config = small_run(
        "model=llama_tiny", f"strategy={preset}", "trainer.devices=2", f"strategy.activation_checkpointing={mode}"
    )
    worst, calls = run_processes(2, counted, config)[0]
    assert broken(worst) == {}
    assert calls == 3 * times * (config.data.global_batch_size // 2 // int(config.data.micro_batch_size))


@pytest.mark.parametrize("preset", one_in(2, ["zero1", "zero3", "zero3_cpu"]))
def test_a_wrong_gradient_of_one_rank_is_named(preset: str) -> None:
    config = small_run("model=llama_tiny", f"strategy={preset}", "trainer.devices=2")
    found = broken(run_processes(2, planted, config, "gradient")[0])
    assert found["gradient"].where == TARGET
    assert "loss" not in found


@pytest.mark.parametrize("preset", one_in(2, ["zero2", "zero3"]))
def test_a_wrong_initial_value_in_one_ranks_part_is_named(preset: str) -> None:
    config = small_run("model=llama_tiny", f"strategy={preset}", "trainer.devices=2")
    found = broken(run_processes(2, planted, config, "master")[0])
    assert [(one.quantity, one.where, one.step) for one in found.values()] == [("initial weights", TARGET, 0)]


@pytest.mark.parametrize(
    "preset",
    [pytest.param("zero1", marks=pytest.mark.exhaustive), pytest.param("zero2", marks=pytest.mark.exhaustive), "zero3"],
)
def test_bf16_is_as_good_as_one_bf16_process(preset: str) -> None:
    config = small_run("model=llama_tiny", f"strategy={preset}", "trainer.devices=2", "precision=bf16", steps=10)
    assert broken(run_processes(2, verified, config)[0]) == {}
