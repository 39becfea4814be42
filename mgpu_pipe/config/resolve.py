"""Values of ``auto`` on this machine and in this world, and the keys whose ``auto`` a launch plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mgpu_pipe.config.group_keys import PeftConfig, StrategyConfig
from mgpu_pipe.config.schema import CheckpointConfig, DataConfig, ModelConfig, PrecisionConfig, RunConfig, TrainerConfig
from mgpu_pipe.system.hardware import gpu_capability, usable_gpus
from mgpu_pipe.system.joined_world import joined_processes

AMPERE = (8, 0)
"""Compute capability of the first GPUs with bf16 and TF32 units."""
Precision = Literal["fp32", "bf16", "bf16_true", "fp16", "fp8"]


def device_type(trainer: TrainerConfig) -> Literal["cpu", "cuda"]:
    """Device type of training: the configured accelerator; ``auto`` is CUDA if torch can use a GPU."""
    if trainer.accelerator == "auto":
        return "cuda" if usable_gpus() else "cpu"
    return "cpu" if trainer.accelerator == "cpu" else "cuda"


def devices_per_node(trainer: TrainerConfig, strategy: StrategyConfig) -> int:
    """Processes per node; ``auto`` is 1 if single, what torchrun or srun started, else the GPUs, or 1 on CPU."""
    if trainer.devices != "auto":
        return trainer.devices
    if strategy.name == "single":
        return 1
    joined = joined_processes()
    if joined is not None:
        return joined[1]
    if device_type(trainer) == "cpu":
        return 1
    return max(1, usable_gpus())


def world_size(trainer: TrainerConfig, strategy: StrategyConfig) -> int:
    """Processes of the run on all nodes."""
    return devices_per_node(trainer, strategy) * trainer.num_nodes


def leaves_out_frozen_weights(peft: PeftConfig, checkpoint: CheckpointConfig) -> bool:
    """Whether checkpoints leave out frozen weights that come from a folder."""
    chosen = checkpoint.frozen_weights
    return chosen == "leave_out" or (chosen == "auto" and peft.name != "none")


def resolve_precision(precision: PrecisionConfig, trainer: TrainerConfig) -> Precision:
    """Configured precision; ``auto`` is bf16 on GPUs that support it, else fp32."""
    if precision.name != "auto":
        return precision.name
    return "bf16" if device_type(trainer) == "cuda" and _is_ampere() else "fp32"


def uses_tf32(precision: PrecisionConfig, trainer: TrainerConfig) -> bool:
    """Whether fp32 products round their inputs to TF32: configured, in an fp32 run on a GPU that supports it."""
    fits = device_type(trainer) == "cuda" and _is_ampere() and resolve_precision(precision, trainer) == "fp32"
    return precision.tf32 and fits


COMPILED_FROM = 100_000_000
"""Parameters from which ``model.compile=auto`` compiles: small models are trained before compiling has paid."""


def prefers_compiled(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, device: str, parameters: int
) -> bool:
    """Whether ``model.compile`` compiles blocks of this many parameters on ``device``, where ``auto`` can."""
    if model.compile != "auto":
        return model.compile
    if device != "cuda" or model.kernels == "liger":  # used instead of compiling
        return False
    by_hooks = strategy.engine == "deepspeed" and strategy.deepspeed.stage == 3  # weights come and go inside a block
    # Float8 pays off in compiled blocks alone.
    return (parameters >= COMPILED_FROM or precision.name == "fp8") and not by_hooks


def _is_ampere() -> bool:
    return (gpu_capability() or AMPERE) >= AMPERE


STRATEGY, MICRO_BATCH, SAVES = "strategy", "data.micro_batch_size", "checkpoint.every_n_steps"


def unplanned_keys(strategy: StrategyConfig, data: DataConfig, checkpoint: CheckpointConfig) -> list[str]:
    """Keys whose ``auto`` or ``max`` a launch replaces by what it plans, before the run's configuration is frozen."""
    asks = {
        STRATEGY: strategy.name == "auto",
        MICRO_BATCH: data.micro_batch_size == "max",
        SAVES: checkpoint.every_n_steps == "auto",
    }
    return [key for key, is_asked in asks.items() if is_asked]


def with_plan_of(config: RunConfig, planned: RunConfig) -> RunConfig:
    """``config`` with the values of ``planned``, the same configuration after planning, for what it asks."""
    keys = unplanned_keys(config.strategy, config.data, config.checkpoint)
    if STRATEGY in keys:
        plan = planned.plan
        predicted = replace(config.plan, predicted_seconds=plan.predicted_seconds, predicted_gib=plan.predicted_gib)
        config = replace(config, strategy=planned.strategy, plan=predicted)
    if STRATEGY in keys or MICRO_BATCH in keys:
        config = replace(config, data=replace(config.data, micro_batch_size=planned.data.micro_batch_size))
    if SAVES in keys:
        saves = replace(config.checkpoint, every_n_steps=planned.checkpoint.every_n_steps)
        config = replace(config, checkpoint=saves)
    return config
