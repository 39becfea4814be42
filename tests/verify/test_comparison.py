"""Oracle: planted errors. The comparison has to find each, say where, and find nothing where there is none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, StepBatch
from mgpu_pipe.objectives.base import Batch
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.verify.baseline import step_batch_of
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.verify.support import small_run

TARGET = "model.layers.1.mlp.down_proj.weight"


def verified(config: RunConfig, planted: str = "") -> list[Worst]:
    """The comparison with one of the errors below; a list for every rank, empty but on rank 0."""
    return worst_of(
        compare(
            config, step_batch_maker=WINDOWS.get(planted, step_batch_of), on_start=STARTS.get(planted, lambda s: None)
        )
    )


def wrong_gradient(strategy: MeshStrategy) -> None:
    if dist.get_rank() == 1:
        parameter(strategy).register_hook(lambda gradient: gradient * 1.001)


def wrong_initialisation(strategy: MeshStrategy) -> None:
    if dist.get_rank() == 1:
        parameter(strategy).data[3, 5] += 1e-9


def wrong_clipping(strategy: MeshStrategy) -> None:
    strategy._max_norm = 0.0999


def wrong_rate(strategy: MeshStrategy) -> None:
    for group in strategy.optimizers[0].param_groups:
        group["initial_lr"] *= 1.01


def parameter(strategy: MeshStrategy) -> torch.nn.Parameter:
    return dict(strategy.objective.model.named_parameters())[TARGET]


def wrong_normalizer(batch: Batch, spec: BatchSpec, step: int, plan: BatchPlan, rank: int) -> StepBatch:
    """The mean over processes of each process's mean: the common mistake."""
    step_batch = step_batch_of(batch, spec, step, plan, rank)
    own = sum(int((micro_batch["labels"] != IGNORE_INDEX).sum()) for micro_batch in step_batch.micro_batches)
    step_batch.loss_denominator = own * plan.data_parallel_size
    return step_batch


def wrong_samples(batch: Batch, spec: BatchSpec, step: int, plan: BatchPlan, rank: int) -> StepBatch:
    """Every process takes the first one's samples."""
    return step_batch_of(batch, spec, step, plan, 0)


WINDOWS = {"normalizer": wrong_normalizer, "samples": wrong_samples}
STARTS = {
    "gradient": wrong_gradient,
    "initialisation": wrong_initialisation,
    "clipping": wrong_clipping,
    "rate": wrong_rate,
}


def broken(worst: list[Worst]) -> dict[str, Worst]:
    return {one.quantity: one for one in worst if not one.passed}


@pytest.mark.parametrize("model", one_in(3, ["llama_tiny", "gpt2_tiny", "qwen3_tiny", "mixtral_tiny"]))
def test_data_parallelism_is_the_plain_computation(model: str) -> None:
    config = small_run(f"model={model}", "strategy=ddp", "trainer.devices=2")
    first, other = run_processes(2, verified, config)
    assert [one.quantity for one in first] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert broken(first) == {}
    assert other == []
    # The bounds are not idle: rounding uses up some of them, the greatest part still free.
    assert all(0 < one.ratio < 0.5 for one in first if one.quantity in ("loss", "gradient", "weights"))


@pytest.mark.slow
def test_sharded_pieces_are_compared_too() -> None:
    config = small_run("model=qwen3_tiny", "strategy=ddp", "trainer.devices=4", dp_replicate=2, dp_shard=2)
    assert config.strategy.dp_shard == 2
    assert broken(run_processes(4, verified, config)[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["optimizer=sgd", "trainer.gradient_clip_val=null", "objective.loss_chunk_tokens=0", "data.packing=none"],
)
def test_one_process_under_other_settings(override: str) -> None:
    config = small_run("model=llama_tiny", "strategy=single", override)
    assert broken(run_processes(1, verified, config)[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", one_in(2, ["auto", "0"]))
def test_bf16_is_as_good_as_one_bf16_process(chunk: str) -> None:
    config = small_run(
        "model=llama_tiny",
        "strategy=ddp",
        "trainer.devices=2",
        "precision=bf16",
        f"objective.loss_chunk_tokens={chunk}",
        steps=10,
    )
    first = run_processes(2, verified, config)[0]
    assert broken(first) == {}
    errors = {one.quantity: one.error for one in first}
    assert errors["initial weights"] == 0.0
    assert errors["weights"] > 1e-5


def test_a_wrong_gradient_is_named() -> None:
    config = small_run("model=llama_tiny", "strategy=ddp", "trainer.devices=2")
    found = broken(run_processes(2, verified, config, "gradient")[0])
    assert found["gradient"].where == TARGET
    assert 1 <= found["gradient"].step <= 3
    assert "loss" not in found
    assert "initial weights" not in found


def test_a_wrong_normaliser_shows_in_the_loss() -> None:
    config = small_run("model=llama_tiny", "strategy=ddp", "trainer.devices=2")
    assert "loss" in broken(run_processes(2, verified, config, "normalizer")[0])


def test_wrong_samples_show_in_loss_and_gradients() -> None:
    config = small_run("model=llama_tiny", "strategy=ddp", "trainer.devices=2")
    assert {"loss", "gradient"} <= set(broken(run_processes(2, verified, config, "samples")[0]))


def test_a_wrong_initial_value_on_one_rank_is_named() -> None:
    config = small_run("model=llama_tiny", "strategy=ddp", "trainer.devices=2")
    found = broken(run_processes(2, verified, config, "initialisation")[0])
    # Later steps start from the plain computation's weights, so only this breaks.
    assert [(one.quantity, one.where, one.step) for one in found.values()] == [("initial weights", TARGET, 0)]


def test_a_wrong_clip_factor_shows_in_the_gradients_and_not_in_the_norm() -> None:
    config = small_run("model=llama_tiny", "strategy=single", "trainer.gradient_clip_val=0.1")
    found = broken(run_processes(1, verified, config, "clipping")[0])
    assert "gradient" in found
    assert "gradient norm" not in found


def test_a_wrong_update_shows_in_the_weights_alone() -> None:
    config = small_run("model=llama_tiny", "strategy=single", "scheduler=constant")
    found = broken(run_processes(1, verified, config, "rate")[0])
    assert set(found) == {"weights"}


@pytest.mark.slow
def test_bf16_hides_no_gross_error() -> None:
    config = small_run("model=llama_tiny", "strategy=ddp", "trainer.devices=2", "precision=bf16")
    found = broken(run_processes(2, verified, config, "normalizer")[0])
    assert {"loss", "gradient"} <= set(found)
