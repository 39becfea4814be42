"""Comparison inside a process group: the configured strategy trains, rank 0 computes the plain steps.

Each step starts from the plain computation's weights and optimizer state. So rounding does not accumulate, and an error
shows in its own step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.live_tensors import DTYPES, dtype_name, select
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice, tiling_fault
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.data.step_batch import BatchSpec, ListedStepBatches, StepBatch
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.objectives.base import Batch, Objective
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.optim.optimizers import build_schedule, optimizer_factory
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.system.compat.lightning_private import quiet_libraries
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.training.trainer import bare_trainer, strategy_class
from mgpu_pipe.verify import certificate as bounds
from mgpu_pipe.verify.baseline import BaselineRun, PlainStep, global_batch, micro_batches, step_batch_of
from mgpu_pipe.verify.certificate import Measurement

StepBatchMaker = Callable[[Batch, BatchSpec, int, BatchPlan, int], StepBatch]


def compare(
    config: RunConfig,
    *,
    step_batch_maker: StepBatchMaker = step_batch_of,
    on_start: Callable[[EngineStrategy], None] = lambda strategy: None,
) -> list[Measurement]:
    """Trains the small ``config`` for ``trainer.max_steps`` and compares every step. A collective call.

    Args:
        step_batch_maker: returns this process's share of a step from ``(global batch, its spec, step, plan,
            data-parallel rank)``.
        on_start: called with the strategy after its model is built and sharded.

    Returns:
        All comparisons on rank 0; an empty list elsewhere.
    """
    quiet_libraries()
    torch.manual_seed(config.seed)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    dims = ParallelDims.resolve(config.strategy, dist.get_world_size())
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    steps = config.trainer.max_steps or 1
    strategy, objective = _configure(config, dims)
    packed = resolve_packing(config.model, config.data, config.objective) != "none"
    batches = [global_batch(objective, config.data, config.seed, step, packed=packed) for step in range(steps)]
    data_parallel_rank = dims.data_parallel_rank(dist.get_rank())
    precision, first = config.precision.name, dist.get_rank() == 0
    plain = BaselineRun(config, objective) if first else None
    alone = BaselineRun(config, objective, precision) if first and precision != "fp32" else None
    watch = _Comparison(objective.batch_spec, plan, batches, on_start, plain, alone, rounds=precision == "bf16_true")
    trainer = bare_trainer(
        accelerator="cpu", devices=dims.world_size, strategy=strategy, max_steps=steps, logger=False, callbacks=[watch]
    )
    spec = objective.batch_spec
    step_batches = [step_batch_maker(batch, spec, step, plan, data_parallel_rank) for step, batch in enumerate(batches)]
    trainer.fit(objective, ListedStepBatches(step_batches))
    return watch.measurements


def _configure(config: RunConfig, dims: ParallelDims) -> tuple[EngineStrategy, Objective]:
    """Strategy and objective, assembled like in training."""

    def build(model: torch.nn.Module, device: torch.device) -> None:
        materialise(model, config.seed, device)  # type: ignore[arg-type]

    strategy = strategy_class(config.strategy.engine).from_config(
        config, dims, torch.device("cpu"), materialise=build, dropout_seed=None, stop_requested=lambda: False
    )
    model = run_model(config)
    fix_rotary_length(model, config.data.seq_len)
    objective = objective_class(config.objective.name).from_config(
        config,
        model,
        optimizer_factory(config.optimizer, model, resolve_precision(config.precision, config.trainer)),
        build_schedule(config.scheduler, config.scheduler.total_steps or 1),
    )
    return strategy, objective


class _Comparison(pl.Callback):
    """Sets the state before each step; compares gradients before and weights after the update.

    Args:
        plain: the plain computation in fp32; on rank 0.
        alone: one process of the configured precision; on rank 0, and None for fp32.
        rounds: whether the strategy keeps weights in bf16.
    """

    def __init__(
        self,
        spec: BatchSpec,
        plan: BatchPlan,
        batches: list[Batch],
        on_start: Callable[[EngineStrategy], None],
        plain: BaselineRun | None,
        alone: BaselineRun | None,
        *,
        rounds: bool,
    ) -> None:
        self.measurements: list[Measurement] = []
        self._plan, self._batches, self._on_start = plan, batches, on_start
        self._spec, self._plain, self._alone, self._rounds = spec, plain, alone, rounds
        self._weights = self._share(self._plain.weights() if self._plain else [])
        self._state: Tensors = {}
        self._expected = PlainStep(0.0, 0.0, {})
        self._alone_errors: dict[tuple[str, str], float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._on_start(trainer.strategy)
        weights = self._weights
        if self._rounds:
            weights = {name: value.bfloat16().float() for name, value in weights.items()}
        errors = self._errors("initial weights", trainer.strategy.model_shards(), weights)
        for name, error in errors.items():
            self._note("initial weights", name, 0, error, bounds.INITIAL, exact=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: StepBatch, batch_idx: int) -> None:
        strategy = trainer.strategy
        fill(strategy.model_shards(), self._weights)
        if self._state:
            check_covered("optimizer state", strategy.optimizer_shards(), self._state)
            fill(strategy.optimizer_shards(), self._state)
        strategy.shards_written()
        if self._alone is not None:
            fill(self._alone.weights(), self._weights)
            fill(self._alone.optimizer_state(), self._state)
        self._take_plain_step(batch.step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = self._expected.gradients
        errors = self._errors("gradient", trainer.strategy.gradient_shards(), gradients, partial=True)
        total = norm_of(gradients.values()) or 1.0
        for name, error in errors.items():
            share = norm_of([gradients[name]]) / total if name in gradients else 0.0
            bound = bounds.GRADIENT * share + bounds.GRADIENT_OF_ALL
            self._note("gradient", name, self._step, error / total, bound)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: StepBatch, batch_idx: int) -> None:
        result = outputs["result"]
        for rank, (loss, norm) in enumerate(exchange_json([result.loss, result.gradient_norm], None)):
            expected = self._expected
            self._note("loss", f"rank {rank}", self._step, _relative(loss, expected.loss), bounds.LOSS)
            self._note("gradient norm", f"rank {rank}", self._step, _relative(norm, expected.norm), bounds.NORM)
        errors = self._errors("weights", trainer.strategy.model_shards(), self._weights)
        total = norm_of(self._weights.values())
        where = max(errors, key=lambda name: errors[name])
        error = sum(value * value for value in errors.values()) ** 0.5 / total
        self._note("weights", where, self._step, error, bounds.WEIGHTS)

    def _take_plain_step(self, step: int) -> None:
        """Runs a plain step on rank 0 and shares its gradients, weights and state with every rank."""
        self._step = step + 1
        if self._plain is not None:
            self._expected = self._plain.step(step, [self._batches[step]])
            if self._alone is not None:
                self._measure_alone(step)
        loss, norm = exchange_json([self._expected.loss, self._expected.norm], None)[0]
        self._expected = PlainStep(loss, norm, from_rank_0(self._expected.gradients))
        self._weights = self._share(self._plain.weights() if self._plain else [])
        self._state = self._share(self._plain.optimizer_state() if self._plain else [])

    def _measure_alone(self, step: int) -> None:
        """Measures the errors of one bf16 process, over the micro-batches of the configured plan."""
        assert self._alone is not None
        assert self._plain is not None
        measured = self._alone.step(step, micro_batches(self._batches[step], self._spec, self._plan.micro_batch_size))
        expected = self._expected
        total = norm_of(expected.gradients.values()) or 1.0
        off = {name: norm_of([measured.gradients[name] - g]) / total for name, g in expected.gradients.items()}
        self._alone_errors = {("gradient", name): error for name, error in off.items()}
        weights = {shard.tensor_slice.name: shard.tensor for shard in self._plain.weights()}
        differences = [shard.tensor - weights[shard.tensor_slice.name] for shard in self._alone.weights()]
        self._alone_errors["weights", ""] = norm_of(differences) / norm_of(weights.values())
        self._alone_errors["loss", ""] = _relative(measured.loss, expected.loss)
        self._alone_errors["gradient norm", ""] = _relative(measured.norm, expected.norm)

    def _share(self, shards: list[LocalShard]) -> Tensors:
        return from_rank_0({shard.tensor_slice.name: shard.tensor for shard in shards})

    def _errors(self, what: str, shards: list[LocalShard], full: Tensors, partial: bool = False) -> dict[str, float]:
        return whole_errors(what, exchange_json(squared_errors(shards, full), None), full, partial)

    def _note(self, quantity: str, where: str, step: int, error: float, bound: float, exact: bool = False) -> None:
        if self._plain is None:
            return
        alone = None
        if self._alone is not None and not exact:
            alone = self._alone_errors.get((quantity, where), self._alone_errors.get((quantity, ""), 0.0))
        self.measurements.append(Measurement(quantity, where, step, error, bound, alone))


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected) if expected else abs(value)


Tensors = dict[str, torch.Tensor]


def from_rank_0(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Broadcast of rank 0's CPU ``tensors``; those of other ranks are ignored. A collective call."""
    header = exchange_json([[name, dtype_name(t), list(t.shape)] for name, t in tensors.items()], None)[0]
    if dist.get_world_size() == 1:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    shapes = [torch.Size(shape) for _, _, shape in header]
    sizes = [shape.numel() * DTYPES[dtype].itemsize for (_, dtype, _), shape in zip(header, shapes, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    if dist.get_rank() == 0 and tensors:
        data = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()])
    dist.broadcast(data, src=0)
    parts = data.split(sizes)
    return {
        name: part.clone().view(DTYPES[dtype]).view(shape)
        for (name, dtype, _), shape, part in zip(header, shapes, parts, strict=True)
    }


@torch.no_grad()
def fill(shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> None:
    """Copies each local shard's part of the whole tensors ``full`` into it; WorkerError if its tensor is not there."""
    for shard in shards:
        shard.tensor.copy_(_part(full, shard.tensor_slice))


def squared_errors(shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> list[list[object]]:
    """``[name, offsets, shape, e]`` by shard, e its squared error against ``full`` (0 if missing), None if not
    finite."""
    errors: list[list[object]] = []
    for shard in shards:
        difference = shard.tensor.detach().cpu().double()
        if shard.tensor_slice.name in full:
            difference = difference - _part(full, shard.tensor_slice).double()
        error = difference.square().sum()
        finite = bool(torch.isfinite(error))
        errors.append(
            [
                shard.tensor_slice.name,
                list(shard.tensor_slice.offsets),
                list(shard.tensor_slice.shape),
                float(error) if finite else None,
            ]
        )
    return errors


def whole_errors(
    what: str, by_rank: Iterable[Iterable[list[object]]], full: Mapping[str, torch.Tensor], partial: bool = False
) -> dict[str, float]:
    """2-norm of each whole tensor's difference, from all ranks' :func:`squared_errors`.

    A block on several ranks counts once, with its worst copy.

    Args:
        what: kind of the tensors, for errors.
        partial: whether a tensor may be missing on all ranks; it then counts as zero.

    Raises:
        WorkerError: the ranks' blocks do not cover a tensor exactly.
    """
    blocks: dict[str, dict[TensorSlice, float]] = {name: {} for name in full}
    for shards in by_rank:
        for name, offsets, shape, error in shards:
            tensor_slice = TensorSlice(str(name), tuple(offsets), tuple(shape))  # type: ignore[arg-type]
            value = float("inf") if error is None else float(error)  # type: ignore[arg-type]
            copies = blocks.setdefault(tensor_slice.name, {})
            copies[tensor_slice] = max(copies.get(tensor_slice, 0.0), value)
    errors: dict[str, float] = {}
    for name, copies in blocks.items():
        if not copies and partial:
            errors[name] = norm_of([full[name]])
            continue
        if name in full:
            fault = tiling_fault(tuple(full[name].shape), list(copies))
            if fault is not None:
                raise WorkerError(f"verify: the strategy's pieces of the {what} do not make up {name}: {fault}")
        errors[name] = sum(copies.values()) ** 0.5
    return errors


def check_covered(what: str, shards: Iterable[LocalShard], full: Mapping[str, torch.Tensor]) -> None:
    """Raises unless all ranks' local shards cover each tensor of ``full`` exactly once. A collective call."""
    mine = [
        [shard.tensor_slice.name, list(shard.tensor_slice.offsets), list(shard.tensor_slice.shape), 0.0]
        for shard in shards
    ]
    whole_errors(what, exchange_json(mine, None), full)


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """2-norm of all elements, in float64."""
    return sum(float(tensor.detach().double().square().sum()) for tensor in tensors) ** 0.5


def _part(full: Mapping[str, torch.Tensor], tensor_slice: TensorSlice) -> torch.Tensor:
    if tensor_slice.name not in full:
        raise WorkerError(f"verify: the strategy holds {tensor_slice.name}, which the plain computation does not have")
    return select(full[tensor_slice.name], tensor_slice.offsets, tensor_slice.shape)
