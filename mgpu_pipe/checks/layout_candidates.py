"""Every layout that a model and a batch allow on given processes, with a bulk estimate of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import family_of, stages_of
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES
from mgpu_pipe.checks.check_sizes import strategy_errors, update_errors
from mgpu_pipe.checks.model_axes import context_parallel_errors, expert_parallel_errors, tensor_parallel_errors
from mgpu_pipe.config.group_keys import PipelineOptions, PlanConfig, PrecisionConfig, StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import ModelConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.planning.hardware_profile import HardwareProfile
from mgpu_pipe.planning.layout_search import (
    AllowedSizes,
    Layout,
    Sharding,
    data_parallel_layouts,
    divisors,
    enumerate_layouts,
    layout_at,
    layout_bytes,
    layout_host_bytes,
    zero_bytes,
)
from mgpu_pipe.planning.memory import activations_of, memory_by_rank, overheads_of, state_of
from mgpu_pipe.planning.model_work import model_work, place_of_state, runs_eager
from mgpu_pipe.planning.run_hardware import CPU
from mgpu_pipe.planning.step_time import StepTime, step_time
from mgpu_pipe.planning.work import Hardware, Work
from mgpu_pipe.topology import ParallelDims

STAGES = (2, 4)
"""Stages of a rank that are tried under schedules which take any number."""
UNTRIED = "gpipe"
"""Schedule that is as fast as 1F1B and keeps more."""
MESH = Sharding()
ON_GPUS = (Sharding(0, "cpu"), Sharding(2, "cpu"), Sharding(3, "cpu"), Sharding(3, "nvme"))
"""Shardings of data parallelism that keep state outside of the GPU."""
ZERO = (Sharding(1), Sharding(2), Sharding(3))
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sharded:
    """Layouts under the same sharding; arrays of equal length.

    Attributes:
        sizes: likely bytes of the rank that needs most.
        host: bytes of a rank in host memory.
    """

    sharding: Sharding
    layouts: Work
    sizes: Array
    host: Array


@dataclass(frozen=True)
class Candidates:
    """All layouts on one number of GPUs: those of the mesh engine, then those of other shardings.

    Attributes:
        words: overrides that choose the processes.
        refused: layouts of shardings that a check refuses.
    """

    config: RunConfig
    words: Sequence[str]
    gpus: int
    kinds: Sequence[Sharded]
    refused: int = 0
    sizes: Array = field(init=False)
    host: Array = field(init=False)

    def __post_init__(self) -> None:
        for name in ("sizes", "host"):
            object.__setattr__(self, name, np.concatenate([getattr(kind, name) for kind in self.kinds]))

    def locate(self, index: int) -> tuple[Sharded, int]:
        """The sharding of a layout, and its place there."""
        for kind in self.kinds:
            if index < len(kind.sizes):
                return kind, index
            index -= len(kind.sizes)
        raise IndexError(index)

    def layout(self, index: int) -> Layout:
        kind, place = self.locate(index)
        return layout_at(kind.layouts, place, kind.sharding)

    def times(self, hardware: Hardware, profile: HardwareProfile) -> StepTime:
        """Seconds of every layout by part, in the order of ``sizes``."""
        each = [(step_time(kind.layouts, hardware, profile.all_constants), len(kind.sizes)) for kind in self.kinds]
        names = vars(each[0][0])
        return StepTime(
            **{name: np.concatenate([np.broadcast_to(vars(t)[name], (size,)) for t, size in each]) for name in names}
        )


def on_processes(trainer: TrainerConfig, profile: HardwareProfile, gpus: int) -> tuple[TrainerConfig, list[str]]:
    """Keys and overrides of so many processes; ConfigError if the GPUs fill no whole number of nodes."""
    typed = trainer.devices
    node = min(gpus, typed if typed != "auto" else int(profile.gpus_per_node))
    if gpus % node:
        below = max(1, gpus // node) * node
        fix = f"use {below} or {below + node}"
        reason = f"a node of {profile.name} has {node} GPUs" if typed == "auto" else f"trainer.devices is {node}"
        raise ConfigError("plan.gpus", gpus, fix, reason)
    accelerator = "cpu" if profile.accelerator == CPU else "cuda"
    trainer = replace(trainer, devices=node, num_nodes=gpus // node, accelerator=accelerator)  # type: ignore[arg-type]
    words = [f"trainer.devices={node}", f"trainer.num_nodes={gpus // node}", f"trainer.accelerator={accelerator}"]
    return trainer, words


def with_typed_schedule(plan: PlanConfig, strategy: StrategyConfig, words: Sequence[str]) -> PlanConfig:
    """A plan's keys with the schedule of ``strategy`` alone if a typed word chooses it; ConfigError if left out."""
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    key, chosen = "strategy.pipeline.schedule", strategy.pipeline.schedule
    if key not in keys and "strategy.pipeline" not in keys:
        return plan
    if plan.schedules and chosen not in plan.schedules:
        raise ConfigError(key, chosen, f"leave out {key} or plan.schedules", "plan.schedules does not try it")
    return replace(plan, schedules=plan.schedules or [chosen])


def _schedules(
    plan: PlanConfig, model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig
) -> tuple[tuple[str, int], ...]:
    """Pipeline schedules to try, each with stages of a rank."""
    chosen = strategy.pipeline.schedule
    names = [chosen] if chosen != PipelineOptions().schedule else [name for name in SCHEDULES if name != UNTRIED]
    names = plan.schedules or names
    can_split = model.compile is not True and resolve_precision(precision, trainer) != "fp8"
    return tuple(
        (name, stages)
        for name, traits in SCHEDULES.items()
        if name in names and (can_split or not traits.splits_backward)
        for stages in (STAGES if traits.more_stages else (traits.stages_per_rank,))
    )


def _allowed_sizes(config: RunConfig, fields: Mapping[str, Any], gpus: int) -> AllowedSizes:
    """Sizes of each axis, and schedules, that the model and the objective allow on ``gpus`` GPUs."""
    data, objective = config.data, config.objective
    model_type, sequence = str(fields["model_type"]), data.seq_len
    refused, family = description(objective.name).refused_axes, family_of(model_type)
    sizes = divisors(gpus)

    def fitting(axis: str, errors: Any) -> tuple[int, ...]:
        return tuple(size for size in sizes if size == 1 or (axis not in refused and not errors(size)))

    tp = fitting("tp", lambda size: tensor_parallel_errors(fields, model_type, size, False, sequence))
    cp = fitting("cp", lambda size: context_parallel_errors(fields, model_type, size, "ring", sequence))
    ep = fitting("ep", lambda size: expert_parallel_errors(fields, model_type, size))
    ulysses = frozenset(
        (a, size)
        for a in tp
        for size in fitting(
            "cp",
            lambda size: context_parallel_errors(fields, model_type, size, "ulysses", sequence, a),  # noqa: B023
        )
    )
    has_stages, layers = stages_of(model_type) is not None, fields["num_hidden_layers"]
    return AllowedSizes(
        tp=tp,
        pp=fitting("pp", lambda size: size > layers or not has_stages),
        cp=cp,
        ulysses=ulysses,
        ep=ep,
        schedules=_schedules(config.plan, config.model, config.strategy, config.precision, config.trainer),
        eager_kernels=float(device_type(config.trainer) == "cuda"),
        has_sequence_parallel=family.sequence is not None and all(sequence % (a * b) == 0 for a in tp for b in cp),
    )


def find_candidates(config: RunConfig, profile: HardwareProfile, gpus: int) -> Candidates:
    """Every layout that the model and the batch allow; ConfigError without a layout."""
    fields = model_fields(config.model)
    trainer, words = on_processes(config.trainer, profile, gpus)
    placed = replace(config, trainer=trainer)
    samples = config.data.global_batch_size

    def on_one_process(sharding: Sharding) -> RunConfig:
        alone = with_layout(placed, Layout(1, 1, 1, 1, 1, 1, 1, 1, "none", False, sharding=sharding))
        return replace(alone, trainer=replace(alone.trainer, devices=1, num_nodes=1))

    alone = on_one_process(MESH)
    model = model_work(alone, fields)
    layouts = enumerate_layouts(model, gpus, samples, _allowed_sizes(placed, fields, gpus))
    if not np.size(layouts.tp):
        fewer = max(size for size in divisors(samples) if size <= gpus)
        fix = f"use plan.gpus={fewer}, or data.global_batch_size={gpus}"
        raise ConfigError("data.global_batch_size", samples, fix, f"no layout divides it over {gpus} processes")
    if memory_by_rank(alone) is None:
        fix = "plan one of a language model, such as objective=causal_lm"
        raise ConfigError("objective.name", config.objective.name, fix, "the memory of this objective is not known")
    kinds, refused = [_shard(alone, fields, layouts, MESH)], 0
    fits_alone = gpus == 1 and bool(np.any(kinds[0].sizes <= profile.memory_bytes))
    offloads = () if fits_alone or profile.accelerator == CPU else ON_GPUS  # a GPU that has enough does not wait
    for sharding in (*ZERO, *offloads):
        if sharding.offload == "nvme" and config.strategy.offload_path is None:
            continue
        others = data_parallel_layouts(layouts, sharding)
        if not np.size(others.tp):
            continue
        alone = on_one_process(sharding)
        if strategy_errors(alone) or update_errors(alone):
            refused += np.size(others.tp)
        else:
            kinds.append(_shard(alone, fields, others, sharding))
    return Candidates(placed, words, gpus, kinds, refused)


def _shard(alone: RunConfig, fields: Mapping[str, Any], layouts: Work, sharding: Sharding) -> Sharded:
    """Layouts under a sharding with their bytes; ``alone`` is the configuration on one process."""
    state, keeps = state_of(alone, fields, ParallelDims()), activations_of(alone, fields, ParallelDims())
    cuts = np.asarray(layouts.tp)
    rows = {tp: activations_of(alone, fields, ParallelDims(tp=int(tp))).logit_rows for tp in set(cuts.tolist())}
    keeps = replace(keeps, logit_rows=np.array([rows[tp] for tp in cuts.tolist()], dtype=np.float64))
    if sharding != MESH:
        where = place_of_state(alone.strategy, resolve_precision(alone.precision, alone.trainer))
        casts = layouts.cast_bytes if sharding.zero == 0 else 0.0
        device = device_type(alone.trainer)
        eager = runs_eager(alone.model, alone.strategy, alone.precision, device, fields)
        layouts = replace(layouts, zero=float(sharding.zero or 3), cast_bytes=casts, eager=eager, **where)
    estimate = zero_bytes if sharding.zero else layout_bytes
    sizes = estimate(layouts, state, keeps, overheads_of(alone.trainer))
    return Sharded(sharding, layouts, sizes, layout_host_bytes(layouts, state))


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """The configuration under a layout, as its overrides would make it."""
    name, sharding = layout.overrides[0].partition("=")[2], layout.sharding
    takes_any = SCHEDULES[layout.schedule].more_stages
    strategy = replace(
        config.strategy,
        name=name,
        engine="deepspeed" if sharding.zero else "mesh",
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")},
        sequence_parallel=layout.sequence_parallel,
        activation_checkpointing=layout.checkpointing,  # type: ignore[arg-type]
        pipeline=replace(
            config.strategy.pipeline,
            schedule=layout.schedule,  # type: ignore[arg-type]
            stages_per_rank=layout.stages_per_rank if takes_any else "auto",
            layers=[],
        ),
        context=replace(config.strategy.context, method=layout.context),  # type: ignore[arg-type]
        offload=sharding.offload,  # type: ignore[arg-type]
        deepspeed=replace(config.strategy.deepspeed, stage=sharding.zero or 3),  # type: ignore[arg-type]
    )
    return replace(config, strategy=strategy, data=replace(config.data, micro_batch_size=layout.micro_batch_size))
