"""Values of ``auto`` on this machine and in this world."""

from __future__ import annotations

from typing import Literal

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.schema import CheckpointConfig, RunConfig, TrainerConfig
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


def devices_per_node(config: RunConfig) -> int:
    """Processes per node; ``auto`` is 1 under ``strategy=single``, else the number that torchrun or srun started.

    Without torchrun or srun, ``auto`` is 1 on CPU and the number of GPUs on CUDA.
    """
    if config.trainer.devices != "auto":
        return config.trainer.devices
    if config.strategy.name == "single":
        return 1
    joined = joined_processes()
    if joined is not None:
        return joined[1]
    if device_type(config.trainer) == "cpu":
        return 1
    return max(1, usable_gpus())


def world_size(config: RunConfig) -> int:
    """Processes of the run on all nodes."""
    return devices_per_node(config) * config.trainer.num_nodes


def leaves_out_frozen_weights(peft: PeftConfig, checkpoint: CheckpointConfig) -> bool:
    """Whether checkpoints leave out frozen weights that come from a folder."""
    chosen = checkpoint.frozen_weights
    return chosen == "leave_out" or (chosen == "auto" and peft.name != "none")


def resolve_precision(config: RunConfig) -> Precision:
    """Configured precision; ``auto`` is bf16 on GPUs that support it, else fp32."""
    if config.precision.name != "auto":
        return config.precision.name
    return "bf16" if device_type(config.trainer) == "cuda" and _is_ampere() else "fp32"


def uses_tf32(config: RunConfig) -> bool:
    """Whether fp32 products round their inputs to TF32: configured, in an fp32 run on a GPU that supports it."""
    fits = device_type(config.trainer) == "cuda" and _is_ampere() and resolve_precision(config) == "fp32"
    return config.precision.tf32 and fits


COMPILED_FROM = 100_000_000
"""Parameters from which ``model.compile=auto`` compiles: small models are trained before compiling has paid."""


def prefers_compiled(config: RunConfig, device: str, parameters: int) -> bool:
    """Whether ``model.compile`` compiles the blocks of a model with this many parameters, where ``auto`` can.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    wanted, strategy = config.model.compile, config.strategy
    if wanted != "auto":
        return wanted
    if device != "cuda" or config.model.kernels == "liger":  # used instead of compiling
        return False
    by_hooks = strategy.engine == "deepspeed" and strategy.deepspeed.stage == 3  # weights come and go inside a block
    # Float8 pays off in compiled blocks alone.
    return (parameters >= COMPILED_FROM or resolve_precision(config) == "fp8") and not by_hooks


def _is_ampere() -> bool:
    return (gpu_capability() or AMPERE) >= AMPERE
