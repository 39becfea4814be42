"""Oracle: the plain one-process loop of tests/support/tiny.py."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from mgpu_pipe.data.step_batch import ListedStepBatches
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.parallelize import ParallelOptions
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.training.step import NonFiniteStep
from tests.support.bf16 import loss_error
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import MODELS, plain_steps, step_batch
from tests.support.trainer import quiet_trainer

LR, STEPS = 3e-4, 10
CPU = torch.device("cpu")


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


class Watch(pl.Callback):
    def __init__(self, poison: int | None) -> None:
        self.rows: list[tuple[float, float]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.poison = poison

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.step == self.poison and trainer.strategy.global_rank == 1:
            pl_module.model.get_input_embeddings().weight.data[:] = float("nan")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((outputs["result"].loss, outputs["result"].gradient_norm))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {p.tensor_slice.name: p.tensor.clone() for p in trainer.strategy.gradient_shards()}


def trained(
    model_name: str,
    micro_batch_size: int,
    precision: str = "fp32",
    chunk: int = 7,
    max_norm: float | None = None,
    poison: int | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = MeshStrategy(
        ParallelDims(dp_replicate=world),
        CPU,
        ParallelOptions(precision=precision, bucket_mib=0.01),
        max_norm=max_norm,
        materialise=lambda model, device: materialise(model, 5, device),
    )
    objective = CausalLMObjective(build_meta(MODELS[model_name]), adamw, lambda step: 1.0, chunk)
    watch = Watch(poison)
    trainer = quiet_trainer(strategy, steps, watch)
    step_batches = [step_batch(step, rank, world, micro_batch_size) for step in range(steps)]
    try:
        trainer.fit(objective, ListedStepBatches(step_batches))
    except NonFiniteStep as error:
        return {"error": str(error), "steps": len(watch.rows)}
    weights = {shard.tensor_slice.name: shard.tensor.clone() for shard in strategy.model_shards()}
    return {"rows": watch.rows, "gradients": watch.gradients, "weights": weights, "global_step": trainer.global_step}


def oracle(model_name: str, max_norm: float | None = None) -> dict[str, Any]:
    model = build_meta(MODELS[model_name])
    materialise(model, 5, CPU)
    return plain_steps(model, STEPS, LR, max_norm)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm((a - b).double()) / torch.linalg.vector_norm(b.double()))


def whole(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "model_name"),
    one_in(
        5,
        [
            (*sizes, name)
            for sizes in ((1, 8), (1, 1), (2, 2), (4, 1))
            for name in ("llama", "gpt2", "qwen3", "mixtral")
        ],
    ),
)
def test_ddp_is_the_plain_loop(model_name: str, world_size: int, micro_batch_size: int) -> None:
    expected = oracle(model_name)
    results = run_processes(world_size, trained, model_name, micro_batch_size)
    for result in results:
        assert result["global_step"] == STEPS
        for (loss, norm), loss0, norm0 in zip(result["rows"], expected["losses"], expected["norms"], strict=True):
            assert abs(loss / loss0 - 1) < 1e-5
            assert abs(norm / norm0 - 1) < 1e-5
        total = float(whole(expected["gradients"]).norm())
        for name, gradient in expected["gradients"].items():
            error = float(torch.linalg.vector_norm((result["gradients"][name] - gradient).double()))
            assert error <= 1e-5 * float(gradient.double().norm()) + 1e-7 * total, name
        assert relative(whole(result["weights"]), whole(expected["weights"])) < 1e-5
        assert torch.equal(whole(result["weights"]), whole(results[0]["weights"]))


@pytest.mark.slow
def test_clipping_uses_the_global_norm() -> None:
    expected = oracle("gpt2", max_norm=0.5)
    (first, _) = run_processes(2, trained, "gpt2", 4, "fp32", 7, 0.5)
    assert max(expected["norms"]) > 0.5
    assert relative(whole(first["weights"]), whole(expected["weights"])) < 1e-5


@pytest.mark.slow
def test_bf16_is_as_close_to_fp32_as_one_bf16_process() -> None:
    expected = oracle("llama")
    (alone,) = run_processes(1, trained, "llama", 8, "bf16", 0)
    single_error = loss_error(alone["rows"], expected["losses"])
    assert 1e-6 < single_error < 5e-3
    assert all(weight.dtype == torch.float32 for weight in alone["weights"].values())
    for result in run_processes(2, trained, "llama", 2, "bf16", 7):
        assert loss_error(result["rows"], expected["losses"]) <= 1.5 * single_error
        assert relative(whole(result["weights"]), whole(expected["weights"])) <= 1.5 * relative(
            whole(alone["weights"]), whole(expected["weights"])
        )


def _saved_between_evaluation_and_training() -> dict[str, Any]:
    """Three bf16 steps; before the third, an evaluation and a look at every local shard, as a checkpoint takes."""
    taken: dict[str, Any] = {}

    class Look(Watch):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch.step == 2:
                taken["loss"] = float(trainer.strategy.run_evaluation(batch))
                shards = [*trainer.strategy.model_shards(), *trainer.strategy.optimizer_shards()]
                taken["dtypes"] = {str(shard.tensor.dtype) for shard in shards}
                taken["bytes"] = sum(len(shard.tensor.contiguous().numpy().tobytes()) for shard in shards)

    original, globals()["Watch"] = Watch, Look
    try:
        return {**trained("llama", 4, "bf16", steps=3), **taken}
    finally:
        globals()["Watch"] = original


@pytest.mark.slow
def test_bf16_state_is_fp32_also_right_after_an_evaluation_and_training_goes_on() -> None:
    untouched = run_processes(2, trained, "llama", 4, "bf16", 7, None, None, 3)
    for result, other in zip(run_processes(2, _saved_between_evaluation_and_training), untouched, strict=True):
        assert result["dtypes"] == {"torch.float32"} and result["bytes"] > 0
        assert result["rows"] == other["rows"]
        assert torch.equal(whole(result["weights"]), whole(other["weights"]))


def test_a_nan_on_one_rank_stops_all_before_the_update() -> None:
    for result in run_processes(2, trained, "llama", 4, "fp32", 7, None, 3):
        assert result == {"error": "the loss at step 4", "steps": 3}


@pytest.mark.slow
def test_two_runs_of_one_topology_are_bit_equal() -> None:
    first, second = (run_processes(3, _six_samples)[0] for _ in range(2))
    assert first["rows"] == second["rows"]
    assert torch.equal(whole(first["weights"]), whole(second["weights"]))


def _six_samples() -> dict[str, Any]:
    from tests.support import tiny

    # Three ranks: eight samples do not divide.
    tiny.global_batch.__defaults__, tiny.step_batch.__defaults__ = (6,), (6,)
    return trained("llama", 2)
