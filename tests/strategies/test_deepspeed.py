"""Oracle: the plain one-process loop of tests/support/tiny.py."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.live_tensors import select
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, tiling_fault
from mgpu_pipe.data.step_batch import ListedStepBatches
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.build_extension import FOLDER
from mgpu_pipe.training.deepspeed.deepspeed_config import generate
from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from mgpu_pipe.training.deepspeed.zero_build import partition_model, prepare_deepspeed
from mgpu_pipe.training.step import NonFiniteStep
from tests.strategies.test_mesh import STEPS, adamw, oracle, relative, whole
from tests.strategies.test_mesh import trained as trained_alone
from tests.support.bf16 import loss_error
from tests.support.processes import run_processes
from tests.support.sampling import one_in, sampled
from tests.support.tiny import MODELS, step_batch
from tests.support.trainer import quiet_trainer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
Parts = list[tuple[Any, tuple[int, ...], torch.Tensor]]


def parts(shards: list[LocalShard]) -> Parts:
    """Copies of a rank's local shards, to travel to the test."""
    return [(shard.tensor_slice, shard.global_shape, shard.tensor.clone()) for shard in shards]


def joined(ranks: list[Parts]) -> dict[str, torch.Tensor]:
    """Whole tensors from every rank's local shards, which must tile them; equal tensor slices on several ranks must be
    equal.
    """
    tensor_slices: dict[str, dict[Any, torch.Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shards in ranks:
        for tensor_slice, shape, values in shards:
            held = tensor_slices.setdefault(tensor_slice.name, {})
            assert tensor_slice not in held or torch.equal(held[tensor_slice], values), tensor_slice
            held[tensor_slice] = values
            shapes[tensor_slice.name] = shape
    found: dict[str, torch.Tensor] = {}
    for name, held in tensor_slices.items():
        assert tiling_fault(shapes[name], list(held)) is None, name
        found[name] = torch.zeros(shapes[name])
        for tensor_slice, values in held.items():
            select(found[name], tensor_slice.offsets, tensor_slice.shape).copy_(values)
    return found


class Watch(pl.Callback):
    def __init__(self, poison: int | None) -> None:
        self.rows: list[tuple[float, float]] = []
        self.gradients: Parts = []
        self.initial: Parts = []
        self.poison = poison

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.initial = parts(trainer.strategy.model_shards())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.step == self.poison and trainer.strategy.global_rank == 1:
            for shard in trainer.strategy.model_shards():
                shard.tensor.fill_(float("nan"))
        if batch.step == self.poison:
            trainer.strategy.shards_written()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((outputs["result"].loss, outputs["result"].gradient_norm))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = parts(trainer.strategy.gradient_shards())


def trained(
    model_name: str,
    stage: Any,
    micro_batch_size: int,
    precision: str = "fp32",
    chunk: int = 7,
    max_norm: float | None = None,
    poison: int | None = None,
    offload: str = "none",
    offload_path: str | None = None,
    samples: int = 8,
    raw: dict[str, Any] | None = None,
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = generate(
        BatchPlan(samples, world, micro_batch_size),
        stage=stage,
        precision=precision,
        bucket_mib=0.01,
        offload=offload,
        offload_path=offload_path,
        raw=raw,
    )
    strategy = DeepSpeedStrategy(
        ParallelDims(dp_shard=world),
        CPU,
        settings,
        precision=precision,
        max_norm=max_norm,
        seed=5,
        materialise=lambda model, device: materialise(model, 5, device),
    )
    objective = CausalLMObjective(build_meta(MODELS[model_name]), adamw, lambda step: 1.0, chunk)
    watch = Watch(poison)
    trainer = quiet_trainer(strategy, STEPS, watch)
    try:
        step_batches = [step_batch(step, rank, world, micro_batch_size, samples) for step in range(STEPS)]
        trainer.fit(objective, ListedStepBatches(step_batches))
    except (NonFiniteStep, ConfigError) as error:
        return {"error": str(error), "steps": len(watch.rows)}
    return {
        "rows": watch.rows,
        "gradients": watch.gradients,
        "initial": watch.initial,
        "weights": parts(strategy.model_shards()),
        "state": parts(strategy.optimizer_shards()),
        "memory": strategy.memory_parts(),
        "global_step": trainer.global_step,
        "head": objective._loss._head is not None,
    }


def with_extensions_in(folder: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` where a worker finds compiled extensions in ``folder``."""
    os.environ[FOLDER] = folder
    return function(*arguments)


def check(model_name: str, results: list[dict[str, Any]], max_norm: float | None = None) -> None:
    """Loss, norm, every gradient and the weights are the plain loop's, within the bounds of verify.certificate."""
    expected = oracle(model_name, max_norm)
    for result in results:
        assert result["global_step"] == STEPS
        for (loss, norm), loss0, norm0 in zip(result["rows"], expected["losses"], expected["norms"], strict=True):
            assert abs(loss / loss0 - 1) < 1e-5
            assert abs(norm / norm0 - 1) < 1e-5
    total = float(whole(expected["gradients"]).norm())
    gradients = joined([result["gradients"] for result in results])
    assert set(gradients) == set(expected["gradients"])
    for name, gradient in expected["gradients"].items():
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (expected["norms"][-1] + 1e-6))
        error = float(torch.linalg.vector_norm((gradients[name] - gradient * clip).double()))
        assert error <= 1e-5 * float(gradient.double().norm()) + 1e-7 * total, name
    weights = joined([result["weights"] for result in results])
    assert relative(whole(weights), whole(expected["weights"])) < 1e-5


FAMILIES = ("llama", "gpt2", "qwen3", "mixtral")
CELLS = list(product((1, 2, 3), FAMILIES, (2, 4), (2, 1)))


ONE_STAGE = [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.exhaustive), 3]
"""``make test`` tries the last; test_zero_is_the_plain_loop has every stage."""


@pytest.mark.parametrize(
    ("stage", "model_name", "world_size", "micro_batch_size"),
    sampled(
        [cell for cell in CELLS if cell[2] * cell[3] == 4],
        lambda stage, model, world, micro: (stage + FAMILIES.index(model) + world // 2) % 12 == 0,
    ),
)
def test_zero_is_the_plain_loop(stage: int, model_name: str, world_size: int, micro_batch_size: int) -> None:
    check(model_name, run_processes(world_size, trained, model_name, stage, micro_batch_size))


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_initial_weights_are_the_keyed_ones_bit_for_bit(stage: int) -> None:
    model = build_meta(MODELS["gpt2"])
    materialise(model, 5, CPU)
    initial = joined([result["initial"] for result in _on_three(stage, 0)])
    assert set(initial) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(initial[name], parameter), name


def parts_of_a_filled_model() -> dict[str, torch.Tensor]:
    """What ZeRO-3 takes out of a model that was read from a folder: this rank's flat parts, and the buffers."""
    prepare_deepspeed(CPU)
    model = materialise(build_meta(MODELS["llama"]), 5, CPU)
    settings = generate(BatchPlan(2, dist.get_world_size(), 1), stage=3)
    assert partition_model(model, settings, CPU, torch.float32) == {}
    parts = {name: p.ds_tensor.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {**parts, **{name: b.clone() for name, b in model.named_buffers()}}


def test_a_model_that_is_filled_already_is_partitioned() -> None:
    first, second = run_processes(2, parts_of_a_filled_model)
    model = materialise(build_meta(MODELS["llama"]), 5, CPU)
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.cat([first[name], second[name]])[: parameter.numel()], parameter.flatten()), name
    assert all(torch.equal(first[name], buffer) for name, buffer in model.named_buffers())


@functools.lru_cache(maxsize=None)
def _on_three(stage: int, turn: int) -> list[dict[str, Any]]:
    """Three ranks: few parameters divide. Each ``turn`` is a run of its own."""
    return run_processes(3, trained, "gpt2", stage, 1, "fp32", 7, None, None, "none", None, 6)


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_clipping_uses_the_global_norm(stage: int) -> None:
    check("gpt2", run_processes(2, trained, "gpt2", stage, 4, "fp32", 7, 0.5), 0.5)


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        pytest.param(1, 2, marks=pytest.mark.exhaustive),
        (2, 2),
        pytest.param(3, 2, marks=pytest.mark.exhaustive),
        pytest.param(3, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_offload_to_host_memory_is_the_plain_loop(stage: int, world_size: int) -> None:
    check("gpt2", run_processes(world_size, trained, "gpt2", stage, 2, "fp32", 7, 0.5, None, "cpu"), 0.5)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_nan_on_one_rank_stops_all_before_the_update(stage: int) -> None:
    for result in run_processes(2, trained, "llama", stage, 4, "fp32", 7, None, 3):
        assert result == {"error": "the loss at step 4", "steps": 3}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_raw_setting_that_deepspeed_refuses_is_named(stage: int) -> None:
    raw = {"zero_optimization": {"overlap_comm": "maybe"}}
    options = ("fp32", 7, None, None, "none", None, 8, raw)
    (result,) = run_processes(1, trained, "llama", stage, 4, *options)
    assert result["error"].startswith(
        "strategy.deepspeed_config.zero_optimization.overlap_comm=maybe: DeepSpeed reports"
    )


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_bf16_is_as_close_to_fp32_as_one_bf16_process(stage: int) -> None:
    expected = oracle("llama")
    (alone,) = run_processes(1, trained_alone, "llama", 8, "bf16", 0)
    single_error = loss_error(alone["rows"], expected["losses"])
    assert 1e-6 < single_error < 5e-3
    results = run_processes(2, trained, "llama", stage, 2, "bf16", 7)
    for result in results:
        assert loss_error(result["rows"], expected["losses"]) <= 1.5 * single_error
    model = build_meta(MODELS["llama"])
    materialise(model, 5, CPU)
    initial = joined([result["initial"] for result in results])
    assert all(torch.equal(initial[name], p) for name, p in model.named_parameters())  # fp32 masters, not rounded
    weights = joined([result["weights"] for result in results])
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert relative(whole(weights), whole(expected["weights"])) <= 1.5 * relative(
        whole(alone["weights"]), whole(expected["weights"])
    )


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_two_runs_of_one_topology_are_bit_equal(stage: int) -> None:
    first, second = (_on_three(stage, turn) for turn in range(2))
    assert first[0]["rows"] == second[0]["rows"]
    assert torch.equal(*(whole(joined([result["weights"] for result in run])) for run in (first, second)))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "micro_batch_size"), one_in(2, [(2, 2), (4, 1)]))
def test_offload_to_a_disk_is_the_plain_loop(
    tmp_path: Path, nvme_extension: str, world_size: int, micro_batch_size: int
) -> None:
    options = ("fp32", 7, 0.5, None, "nvme", str(tmp_path))
    arguments = (nvme_extension, trained, "wide", 3, micro_batch_size, *options)
    check("wide", run_processes(world_size, with_extensions_in, *arguments), 0.5)
    assert list(tmp_path.rglob("*.tensor.swp"))  # the state is large enough to have been there


@pytest.mark.parametrize(
    ("stage", "precision"),
    sampled(
        product((1, 2, 3), ("fp32", "bf16")), lambda stage, precision: (stage, precision) in ((2, "fp32"), (3, "bf16"))
    ),
)
def test_a_rank_keeps_what_the_closed_form_says(stage: int, precision: str) -> None:
    """ZeRO's memory model (Rajbhandari et al. 2020), with fp32 gradients, and fp32 weights their own masters."""
    world, number = 2, sum(p.numel() for p in build_meta(MODELS["llama"]).parameters())
    part = number / world
    compute, masters = (4, 0) if precision == "fp32" else (2, 4)
    expected = {
        "weights": compute * (part if stage == 3 else number) + masters * part,
        "gradients": 4 * (number if stage == 1 else part),
        "optimizer": 8 * part,
    }
    for result in run_processes(world, trained, "llama", stage, 2, precision):
        for name, size in expected.items():
            assert abs(result["memory"][name] / size - 1) < 0.02, name
