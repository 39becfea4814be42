"""Oracle: the uninterrupted plain run of one process, whatever engine and world size its parts were made by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.data.step_batch import ListedStepBatches
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.parallelize import ParallelOptions
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import generate
from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights
from mgpu_pipe.training.strategy import EngineStrategy
from tests.strategies.test_deepspeed import joined, parts, with_extensions_in
from tests.strategies.test_mesh import LR, relative, whole
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import MODELS, step_batch
from tests.support.trainer import quiet_trainer

pytestmark = pytest.mark.slow

CPU, HALF, ALL = torch.device("cpu"), 4, 9
FROZEN = ("wte", "embed_tokens", "h.0.mlp", "layers.0.mlp")


def built(model_name: str, frozen: bool) -> torch.nn.Module:
    model = build_meta(MODELS[model_name])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and any(part in name for part in FROZEN)))
    return model


def decaying_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=0.1, fused=True)


def strategy_of(engine: str, precision: str) -> EngineStrategy:
    world = dist.get_world_size()

    def fill(model: Any, device: torch.device) -> None:
        materialise(model, 5, device)

    if engine == "ddp":
        options = ParallelOptions(precision=precision, bucket_mib=0.01)
        return MeshStrategy(ParallelDims(dp_replicate=world), CPU, options, materialise=fill)
    stage, _, offload = engine.removeprefix("zero").partition("_")
    offload, _, path = offload.partition(":")
    settings = generate(
        BatchPlan(8, world, 2),
        stage=int(stage),  # type: ignore[arg-type]
        bucket_mib=0.01,
        precision=precision,
        offload=offload or "none",
        offload_path=path or None,
    )
    return DeepSpeedStrategy(ParallelDims(dp_shard=world), CPU, settings, materialise=fill, seed=5, precision=precision)


class Segment(pl.Callback):
    def __init__(self, source: Path | None) -> None:
        self.source = source
        self.losses: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.source is not None:
            reader = CheckpointReader(self.source, "full")
            restore_weights(reader, trainer.strategy)
            restore_optimizer(reader, trainer.strategy)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["result"].loss)


def segment(
    engine: str,
    model_name: str,
    frozen: bool,
    start: int,
    stop: int,
    source: Path | None,
    target: Path | None,
    precision: str = "fp32",
) -> list[float]:
    """Train steps ``start`` to ``stop``, from the checkpoint ``source``, and leave one under ``target``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy, watch = strategy_of(engine, precision), Segment(source)
    objective = CausalLMObjective(built(model_name, frozen), decaying_adamw, lambda step: 1.0, 7)
    trainer = quiet_trainer(strategy, stop - start, watch)
    trainer.fit(objective, ListedStepBatches([step_batch(step, rank, world, 2) for step in range(start, stop)]))
    if target is not None:
        config = target.parent / "config.yaml"
        if rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            config.write_text("{}\n")
        dist.barrier()
        state = {"step": stop}
        save(target, stop, strategy.model_shards(), strategy.optimizer_shards(), state, config)
    return watch.losses


def resumed(
    tmp_path: Path, model_name: str, frozen: bool, first: tuple[str, int], then: tuple[str, int], extensions: str = ""
) -> None:
    """Save under ``first``, go on under ``then``: the losses are those of one process that was never stopped."""
    (expected,) = run_processes(1, segment, "ddp", model_name, frozen, 0, ALL, None, None)
    root = tmp_path / "checkpoints"
    engine, world = first
    before = run_processes(
        world, with_extensions_in, extensions, segment, engine, model_name, frozen, 0, HALF, None, root
    )
    engine, world = then
    step = root / f"step-{HALF:08d}"
    arguments = (model_name, frozen, HALF, ALL, step, tmp_path / "again" / "checkpoints")
    after = run_processes(world, with_extensions_in, extensions, segment, engine, *arguments)
    for losses in [x + y for x in before for y in after]:
        assert max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(("zero3", 2), ("ddp", 1), marks=pytest.mark.exhaustive),
        pytest.param(("ddp", 1), ("zero3", 4), marks=pytest.mark.exhaustive),
        pytest.param(("zero3", 4), ("ddp", 2), marks=pytest.mark.exhaustive),
        pytest.param(("zero1", 2), ("zero3", 4), marks=pytest.mark.exhaustive),
        pytest.param(("zero2", 4), ("zero1", 2), marks=pytest.mark.exhaustive),
        (("zero3", 2), ("zero2", 4)),
        pytest.param(("ddp", 2), ("zero1", 4), marks=pytest.mark.exhaustive),
        pytest.param(("zero3_cpu", 2), ("zero3", 4), marks=pytest.mark.exhaustive),
        pytest.param(("zero3", 4), ("zero3_cpu", 2), marks=pytest.mark.exhaustive),
    ],
)
def test_any_engine_goes_on_from_any_other(tmp_path: Path, first: tuple[str, int], then: tuple[str, int]) -> None:
    resumed(tmp_path, "llama", False, first, then)


@pytest.mark.parametrize(
    ("first", "then"), one_in(3, [(("zero3", 4), ("zero2", 2)), (("zero1", 2), ("ddp", 1)), (("ddp", 1), ("zero3", 2))])
)
@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_tied_embeddings_and_frozen_parameters(
    tmp_path: Path, frozen: bool, first: tuple[str, int], then: tuple[str, int]
) -> None:
    resumed(tmp_path, "gpt2", frozen, first, then)


@pytest.mark.slow
@pytest.mark.parametrize("saves", one_in(2, [True, False]))
def test_state_on_a_disk_goes_on_elsewhere_and_back(tmp_path: Path, nvme_extension: str, saves: bool) -> None:
    on_disk, plain = (f"zero3_nvme:{tmp_path}", 2), ("ddp", 1)
    first, then = (on_disk, plain) if saves else (plain, on_disk)
    resumed(tmp_path, "wide", False, first, then, nvme_extension)
    assert list(tmp_path.rglob("*.tensor.swp"))


class Gradients(pl.Callback):
    """The names of the parameters that have a gradient when the update begins."""

    names: set[str]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.names = {shard.tensor_slice.name for shard in trainer.strategy.gradient_shards()}


def fit(strategy: EngineStrategy, model: torch.nn.Module, steps: int) -> set[str]:
    """Train ``model`` from step 0 on this process's share of tests/support/tiny.py's batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gradients = Gradients()
    trainer = quiet_trainer(strategy, steps, gradients)
    objective = CausalLMObjective(model, decaying_adamw, lambda step: 1.0, 7)
    trainer.fit(objective, ListedStepBatches([step_batch(step, rank, world, 2) for step in range(steps)]))
    return gradients.names


def unused_branch(stage: int) -> Any:
    """A model that was filled beforehand and has a branch that no forward pass uses."""
    model = materialise(build_meta(MODELS["llama"]), 5, CPU)
    model.extra = torch.nn.Linear(5, 3)
    torch.nn.init.constant_(model.extra.weight, 2.0)
    world = dist.get_world_size()
    if stage == 0:
        strategy: EngineStrategy = MeshStrategy(ParallelDims(dp_replicate=world), CPU)
    else:
        settings = generate(BatchPlan(8, world, 2), stage=stage, bucket_mib=0.01)  # type: ignore[arg-type]
        strategy = DeepSpeedStrategy(ParallelDims(dp_shard=world), CPU, settings)
    names = fit(strategy, model, 3)
    return parts(strategy.model_shards()), names


@pytest.mark.parametrize("stage", one_in(2, [1, 2, 3]))
def test_a_branch_that_is_not_used_keeps_its_weights_as_in_one_process(stage: int) -> None:
    expected = joined([run_processes(1, unused_branch, 0)[0][0]])
    results = run_processes(2, unused_branch, stage)
    weights = joined([shards for shards, _ in results])
    # Weight decay would shrink them: a gradient of zero is not the same as none.
    assert torch.equal(weights["extra.weight"], torch.full((3, 5), 2.0))
    assert relative(whole(weights), whole(expected)) < 1e-5
    names = set().union(*(found for _, found in results))
    assert {name for name in weights if name not in names} == {"extra.weight", "extra.bias"}


def frozen_in_bf16(engine: str) -> Any:
    strategy = strategy_of(engine, "bf16")
    model = built("gpt2", True)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    fit(strategy, model, 2)
    return frozen, parts(strategy.model_shards())


@pytest.mark.parametrize("engine", one_in(2, ["zero1", "zero2", "zero3"]))
def test_frozen_weights_keep_their_fp32_bits_under_bf16(engine: str) -> None:
    results = run_processes(2, frozen_in_bf16, engine)
    weights = joined([shards for _, shards in results])
    initial = dict(materialise(build_meta(MODELS["gpt2"]), 5, CPU).named_parameters())
    assert set(weights) == set(initial)
    frozen = results[0][0]
    assert "transformer.wte.weight" in frozen
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, initial[name]) == (name in frozen), name
