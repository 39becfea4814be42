"""Checks of the GPUs that a run would use, and of what its processes talk by. No torch."""

from __future__ import annotations

import os
import socket

from mgpu_pipe.config.hardware import gpu_capability, usable_gpus, used_memory, why_no_gpu
from mgpu_pipe.config.interfaces import INTERFACES, told_interfaces
from mgpu_pipe.config.resolve import AMPERE, device_type, resolve_precision, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError

IN_USE = 0.05
"""Share of a GPU's memory above which somebody else is computing there."""
GIB = 1 << 30


def device_errors(config: RunConfig, joined: bool, elsewhere: bool) -> list[ConfigError]:
    """What this machine lacks; arguments as of :func:`mgpu_pipe.checks.values.relation_errors`."""
    if config.launch.type != "local" and not joined:
        return []  # of a job, its nodes tell
    interfaces = [] if elsewhere else _interface_errors(config, joined)
    if device_type(config) == "cpu":
        return interfaces
    trainer, gpus = config.trainer, usable_gpus()
    if gpus == 0 and elsewhere:
        return []
    if gpus == 0:
        fix = "use trainer.accelerator=cpu, or install torch for CUDA and give the process a GPU"
        reason = f"torch can use no GPU here: {why_no_gpu()}"
        return [ConfigError("trainer.accelerator", trainer.accelerator, fix, reason)]
    if not joined and trainer.devices != "auto" and trainer.devices > gpus:
        fix = f"use at most {gpus}, or trainer.accelerator=cpu"
        return [ConfigError("trainer.devices", trainer.devices, fix, f"this machine has {gpus} GPUs to use")]
    return [*interfaces, *_age_errors(config)]


def _interface_errors(config: RunConfig, joined: bool) -> list[ConfigError]:
    kind = device_type(config)
    if (not joined and world_size(config) == 1) or told_interfaces(kind) != []:
        return []
    variable, there = INTERFACES[kind], ", ".join(name for _, name in socket.if_nameindex())
    reason = "it means none of this machine's network interfaces"
    return [ConfigError(variable, os.environ[variable], f"use one of {there}, or unset it", reason)]


def _age_errors(config: RunConfig) -> list[ConfigError]:
    """Types and kernels that the GPU is too old for; of float8 see :mod:`mgpu_pipe.checks.numerics`."""
    capability = gpu_capability()
    if capability is None or capability >= AMPERE:
        return []
    has = f"a GPU of compute capability 8.0 or higher, and this one has {capability[0]}.{capability[1]}"
    errors = []
    if resolve_precision(config) in ("bf16", "bf16_true"):
        errors.append(ConfigError("precision.name", config.precision.name, "use fp16 or fp32", f"bf16 needs {has}"))
    attention = config.model.attn_implementation
    if attention == "flash_attention_2":
        errors.append(ConfigError("model.attn_implementation", attention, "use auto", f"flash-attn needs {has}"))
    return errors


def device_notices(config: RunConfig) -> list[tuple[str, str]]:
    """Key and text of what is worth knowing about this machine's GPUs."""
    if device_type(config) == "cuda":
        held = {number: of for number, of in used_memory().items() if of[0] > IN_USE * of[1]}
        return [("trainer.devices", _in_use(number, *of)) for number, of in held.items()]
    why = why_no_gpu()
    if config.trainer.accelerator == "auto" and why.startswith(("the NVIDIA driver", "CUDA_VISIBLE_DEVICES")):
        return [("trainer.accelerator", f"runs on CPU: {why}")]
    return []


def _in_use(number: int, used: int, total: int) -> str:
    return (
        f"GPU {number} is in use: other processes hold {used / GIB:.1f} of its {total / GIB:.1f} GiB (nvidia-smi names "
        "them; CUDA_VISIBLE_DEVICES chooses others)"
    )
