"""The small run that stands for the configured one: same strategy, optimizer, precision and clipping. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Any

from mgpu_pipe.architectures.formulas.pipeline_schedules import stages_by_rank
from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.group_keys import EvalConfig, OptimizerConfig, PeftConfig, StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import (
    CheckpointConfig,
    DataConfig,
    RunConfig,
    SchedulerConfig,
    SyntheticConfig,
    TrainerConfig,
)
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import is_noise, resolved_fields
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.verify.shrink_model import in_fewer_layers, shrink_model

STEPS = 10
MAX_LR = 3e-4
"""Highest learning rate. Above it, rounding alone makes one process differ from itself: 4e-3 at a rate of 3e-3."""
SEQ_LEN = 32
BUCKET_MIB = 0.05
"""Several gradient buckets even for a small model."""
MAX_RANK = 4
"""Highest rank of adapters."""
SHOWN = ("model", "data", "objective", "optimizer", "scheduler", "peft", "strategy", "precision", "trainer")
NOTABLE = ("optimizer.lr", "strategy.offload")
NOISE_REASON = "parity under random noise is statistical"
REASONS = {
    "optimizer.lr": "the bounds hold for rates up to 3e-4",
    "data.source": "random packed documents with uneven label masks and padding",
    "objective.loss_chunk_tokens": "so that the loss is computed in several chunks",
    "strategy.offload": "on CPU processes everything is in host memory already",
    "strategy.bucket_mib": "so that there are several gradient buckets",
    "model.attn_implementation": "CPUs have no such kernel",
    "model.kernels": "CPUs have no such kernels",
    "model.path": "the small model starts from random weights",
    "trainer.accelerator": "the topology runs as CPU processes",
}


@dataclass
class Shrunk:
    """Small run and its changes: key -> ``{"from", "to"}`` and, for some, ``"why"``."""

    config: RunConfig
    changes: dict[str, dict[str, Any]]

    def notices(self) -> list[str]:
        """Changes to report to the user: those that reduce what is verified."""
        notable = {key: change for key, change in self.changes.items() if key in NOTABLE or _is_noise(key)}
        return [
            f"{key}={change['to']} here instead of {change['from']}: {change['why']}" for key, change in notable.items()
        ]


def shrink(config: RunConfig, dims: ParallelDims, steps: int = STEPS) -> Shrunk:
    """The small run of ``config`` on the topology ``dims``.

    Raises:
        ConfigError: sizes of the configured batch that do not divide, or a precision that CPU processes do not have.
        ModelFolderError: ``model.path`` has no readable ``config.json``.
    """
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    if config.precision.name == "fp8":
        reason = "verify computes on CPU processes, which have no float8"
        raise ConfigError("precision.name", "fp8", "verify with precision=bf16", reason)
    steps = min(steps, config.trainer.max_steps or steps)
    unit = lcm(2 * dims.cp, dims.tp)  # a context-parallel rank may take two pieces of the sequence
    seq_len = -(-min(config.data.seq_len, SEQ_LEN) // unit) * unit
    micro = min(plan.micro_batch_size, 2 if dims.data_parallel_size > 1 else 4)
    # Every schedule accepts twice as many micro-batches as ranks.
    num_micro = 2 * dims.pp if dims.pp > 1 else 2 if plan.num_micro_batches > 1 else 1
    chosen = config.strategy.pipeline
    stages_of_ranks = stages_by_rank(chosen.schedule, dims.pp, chosen.stages_per_rank) if dims.pp > 1 else ((0,),)
    stages = sum(map(len, stages_of_ranks))
    model_class = description(config.objective.name).model_class
    configured = replace(config.model, config={**config.model.config, **config.objective.model_fields()})
    model = shrink_model(configured, dims, seq_len, stages, model_class)
    small = replace(
        config,
        model=model,
        data=_synthetic_data(config.data, seq_len, micro, micro * num_micro * dims.data_parallel_size),
        objective=config.objective.shrunk(micro * seq_len),
        peft=_small_adapters(config.peft, int(resolved_fields(model).get("num_hidden_layers") or 1)),
        optimizer=_small_optimizer(config.optimizer, steps, int(resolved_fields(model).get("num_hidden_layers") or 1)),
        scheduler=_small_schedule(config.scheduler, steps),
        strategy=_sizes_filled_in(config.strategy, dims),
        precision=replace(config.precision, name=resolve_precision(config.precision, config.trainer)),
        checkpoint=CheckpointConfig(save_last=False),
        trainer=_on_cpu_processes(config.trainer, dims.world_size, steps),
        eval=EvalConfig(),
        logger={},
        callbacks={},
        launch=replace(config.launch, max_restarts=0),
    )
    fields_before = resolved_fields(config.model)  # with values of a folder, and a class's defaults
    return Shrunk(small, _changes(fields_before, _flat(to_plain(config)), _flat(to_plain(small))))


def _synthetic_data(data: DataConfig, seq_len: int, micro_batch_size: int, global_batch_size: int) -> DataConfig:
    """Random documents in batches of these sizes; keys of a single source go."""
    return replace(
        DataConfig(**{field.name: getattr(data, field.name) for field in fields(DataConfig)}),
        source="synthetic",
        paths=[],
        validation_paths=[],
        chat_template=None,
        tokenizer="auto",
        synthetic=SyntheticConfig(),
        seq_len=seq_len,
        target_len="auto",
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )


def _on_cpu_processes(trainer: TrainerConfig, devices: int, steps: int) -> TrainerConfig:
    """A few steps on CPU processes, without evaluation and samples."""
    return replace(
        trainer,
        accelerator="cpu",
        devices=devices,
        num_nodes=1,
        max_steps=steps,
        max_epochs=None,
        val_every_n_steps=None,
        sample_every_n_steps=None,
    )


def _small_optimizer(optimizer: OptimizerConfig, steps: int, layers: int) -> OptimizerConfig:
    groups = {
        name: replace(
            group,
            parameters=in_fewer_layers(group.parameters, layers),
            lr=None if group.lr is None else min(group.lr, MAX_LR),
            frozen_until=min(group.frozen_until, steps // 2),
        )
        for name, group in optimizer.groups.items()
    }
    return replace(optimizer, lr=min(optimizer.lr, MAX_LR), groups=groups)


def _small_adapters(peft: PeftConfig, layers: int) -> PeftConfig:
    # Small widths are no multiples of four-bit blocks.
    return replace(
        peft.without_quantisation(),
        r=min(peft.r, MAX_RANK),
        init_from=None,
        dropout=0.0,
        targets=in_fewer_layers(peft.targets, layers),
        train_also=in_fewer_layers(peft.train_also, layers),
    )


def _sizes_filled_in(strategy: StrategyConfig, dims: ParallelDims) -> StrategyConfig:
    if strategy.engine == "mesh":  # on the CPU all state is in host memory
        strategy = replace(strategy, offload="none")
    return replace(
        strategy,
        dp_replicate=dims.dp_replicate,
        dp_shard=dims.dp_shard,
        tp=dims.tp,
        pp=dims.pp,
        cp=dims.cp,
        ep=dims.ep,
        bucket_mib=min(strategy.bucket_mib, BUCKET_MIB),
        pipeline=replace(strategy.pipeline, layers=[]),
    )


def _small_schedule(scheduler: SchedulerConfig, steps: int) -> SchedulerConfig:
    """Schedule of the same shape over few steps, with warm-up, plateau and decay."""
    decay = None if scheduler.decay_steps is None else min(scheduler.decay_steps, max(1, steps // 3))
    return replace(
        scheduler, total_steps=steps, warmup_steps=min(scheduler.warmup_steps, steps // 4), decay_steps=decay
    )


def _changes(
    fields_before: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    old = {**{f"model.config.{name}": value for name, value in fields_before.items()}, **before}
    changes: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys([*before, *after]):
        if key.split(".")[0] in SHOWN and old.get(key) != after.get(key) and key in after:
            changes[key] = {"from": old.get(key), "to": after[key]}
            why = NOISE_REASON if _is_noise(key) else REASONS.get(key)
            if why:
                changes[key]["why"] = why
    return changes


def _is_noise(key: str) -> bool:
    return key.startswith("model.config.") and is_noise(key.removeprefix("model.config."))


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
