"""Checks of a run's GPUs, compilers, network interfaces and numeric types."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.resolve import AMPERE, device_type, resolve_precision, world_size
from mgpu_pipe.config.schema import ModelConfig, PrecisionConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.models.kernels.layers import obstacle
from mgpu_pipe.system.hardware import (
    cpu_is_fast_at_bf16,
    cpu_is_fast_at_fp16,
    gpu_capability,
    usable_gpus,
    used_memory,
    why_no_flash_attention_3,
    why_no_gpu,
)


def compiler(names: Sequence[str] = ("c++",)) -> str | None:
    """The first of ``names`` that is installed, or ``CXX`` instead if it is set; None if it is missing."""
    wanted = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [wanted] if wanted else names)), None)


def has_python_headers() -> bool:
    """Whether ``Python.h`` is in this Python's include folders; distributions ship it in a separate package."""
    paths = sysconfig.get_paths()
    return any((Path(paths[name]) / "Python.h").is_file() for name in ("include", "platinclude"))


def missing_compiler(key: str, value: object, who: str) -> Iterator[ConfigError]:
    """The error of a missing compiler; ``who`` is a clause that says who compiles what."""
    wanted = os.environ.get("CXX")
    there = f"CXX={wanted} does not exist" if wanted else "this machine has no C++ compiler"
    fix = "install one (Debian and Ubuntu: apt-get install g++), or set CXX"
    yield ConfigError(key, value, fix, f"{who}, and {there}")


def missing_headers(key: str, value: object, who: str) -> Iterator[ConfigError]:
    """The error of missing Python headers; nothing if they are installed."""
    if not has_python_headers():
        fix = "install them (Debian and Ubuntu: apt-get install python3-dev; Fedora: python3-devel)"
        yield ConfigError(key, value, fix, f"{who}, and Python's headers (Python.h) are not here")


FP8_CAPABILITY = (8, 9)
"""The first GPUs with float8 matrix units (Ada, Hopper)."""
COMPILERS = ("g++", "c++", "clang++")


def numerics_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of precision, kernels, offload and compilation that this machine or the mesh engine cannot do."""
    return [
        *_fp8_errors(config.model, config.precision, config.trainer),
        *_flash_errors(config.model),
        *_liger_errors(config.model, config.strategy, config.precision, config.trainer),
        *_offload_errors(config.strategy, config.trainer),
        *(compile_errors() if config.model.compile is True and device_type(config.trainer) == "cpu" else []),
    ]


def emulated_type(precision: PrecisionConfig, trainer: TrainerConfig) -> str | None:
    """The run's 16-bit type on a CPU without units for it; None if the CPU has units or the type is another."""
    if device_type(trainer) != "cpu":
        return None
    short = resolve_precision(precision, trainer).removesuffix("_true")
    units: dict[str, Callable[[], bool]] = {"bf16": cpu_is_fast_at_bf16, "fp16": cpu_is_fast_at_fp16}
    return short if short in units and not units[short]() else None


def _fp8_errors(model: ModelConfig, precision: PrecisionConfig, trainer: TrainerConfig) -> list[BadInputError]:
    if precision.name != "fp8":
        return []
    capability = gpu_capability() if device_type(trainer) == "cuda" else None
    if capability is None or capability < FP8_CAPABILITY:
        has = "this machine has no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        reason = f"float8 needs a GPU of compute capability 8.9 or higher, and {has}"
        return [ConfigError("precision.name", "fp8", "use precision=bf16", reason)]
    if model.compile is False:
        reason = "float8 products are slower than bf16's where their scaling is not compiled"
        return [ConfigError("model.compile", False, "use auto or true, or precision=bf16", reason)]
    if PathFinder.find_spec("torchao") is None:
        reason = "float8 needs the package torchao"
        return [ConfigError("precision.name", "fp8", "install it (pip install torchao), or use precision=bf16", reason)]
    return []


def _flash_errors(model: ModelConfig) -> list[BadInputError]:
    if model.flash_attention != "fa3" or not (why := why_no_flash_attention_3()):
        return []
    return [ConfigError("model.flash_attention", "fa3", "use fa2", why)]


def _liger_errors(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig
) -> list[BadInputError]:
    if model.kernels != "liger" or not (fields := model_fields(model)):
        return []
    problem = obstacle(model, strategy, precision, trainer, str(fields.get("model_type")))
    return [] if problem is None else [ConfigError("model.kernels", "liger", problem[1], problem[0])]


def _offload_errors(strategy: StrategyConfig, trainer: TrainerConfig) -> list[BadInputError]:
    if strategy.engine != "mesh" or strategy.offload == "none":
        return []
    if strategy.offload == "nvme":
        reason = "the mesh engine offloads to host memory only"
        return [ConfigError("strategy.offload", "nvme", "use strategy=zero3_nvme, or cpu", reason)]
    if device_type(trainer) == "cpu":
        reason = "on the CPU everything is in host memory already"
        return [ConfigError("strategy.offload", "cpu", "use none", reason)]
    return []


def compile_errors() -> list[BadInputError]:
    """Errors of a compiler or headers that torch.compile needs on the CPU and does not find."""
    what = ("model.compile", True, "torch.compile builds C++ code on the CPU")
    return [*(missing_compiler(*what) if compiler(COMPILERS) is None else ()), *missing_headers(*what)]


INTERFACES = {"cuda": "NCCL_SOCKET_IFNAME", "cpu": "GLOO_SOCKET_IFNAME"}
"""Environment variable of NCCL and of gloo."""
IN_USE = 0.05
"""Share of a GPU's memory above which another process uses it."""
GIB = 1 << 30


def device_errors(strategy: StrategyConfig, trainer: TrainerConfig, joined: bool, elsewhere: bool) -> list[ConfigError]:
    """Errors of devices and interfaces that this machine lacks.

    Args:
        joined: this process is a rank of a world that was started from outside, and may see only its own GPU.
        elsewhere: the run may be for another machine with GPUs.
    """
    interfaces = [] if elsewhere else _interface_errors(strategy, trainer, joined)
    if device_type(trainer) == "cpu":
        return interfaces
    gpus = usable_gpus()
    if gpus == 0 and elsewhere:
        return []
    if gpus == 0:
        fix = "use trainer.accelerator=cpu, or install torch for CUDA and give the process a GPU"
        reason = f"torch can use no GPU here: {why_no_gpu()}"
        return [ConfigError("trainer.accelerator", trainer.accelerator, fix, reason)]
    if not joined and trainer.devices != "auto" and trainer.devices > gpus:
        fix = f"use at most {gpus}, or trainer.accelerator=cpu"
        return [ConfigError("trainer.devices", trainer.devices, fix, f"this machine has {gpus} GPUs to use")]
    return interfaces


def configured_interfaces(device_type: str) -> list[str] | None:
    """Interfaces that the variable selects, as NCCL reads it (gloo: whole names); None if it is not set."""
    selection = os.environ.get(INTERFACES[device_type], "")
    if not selection:
        return None
    there = [name for _, name in socket.if_nameindex()]
    if device_type == "cpu":
        return [name for name in there if name in selection.split(",")]
    all_but, whole = selection.startswith("^"), selection.lstrip("^").startswith("=")
    names = tuple(selection.lstrip("^=").split(","))
    return [name for name in there if (name in names if whole else name.startswith(names)) != all_but]


def _interface_errors(strategy: StrategyConfig, trainer: TrainerConfig, joined: bool) -> list[ConfigError]:
    kind = device_type(trainer)
    if (not joined and world_size(trainer, strategy) == 1) or configured_interfaces(kind) != []:
        return []
    variable, there = INTERFACES[kind], ", ".join(name for _, name in socket.if_nameindex())
    reason = "it means none of this machine's network interfaces"
    return [ConfigError(variable, os.environ[variable], f"use one of {there}, or unset it", reason)]


def age_errors(model: ModelConfig, precision: PrecisionConfig, trainer: TrainerConfig) -> list[ConfigError]:
    """Errors of types and kernels that need a newer GPU, except float8."""
    capability = gpu_capability() if device_type(trainer) == "cuda" else None
    if capability is None or capability >= AMPERE:
        return []
    has = f"a GPU of compute capability 8.0 or higher, and this one has {capability[0]}.{capability[1]}"
    errors = []
    if resolve_precision(precision, trainer) in ("bf16", "bf16_true"):
        errors.append(ConfigError("precision.name", precision.name, "use fp16 or fp32", f"bf16 needs {has}"))
    attention = model.attn_implementation
    if attention == "flash_attention_2":
        errors.append(ConfigError("model.attn_implementation", attention, "use auto", f"flash-attn needs {has}"))
    return errors


def device_notices(trainer: TrainerConfig) -> list[tuple[str, str]]:
    """Key and text of notices about this machine's GPUs."""
    if device_type(trainer) == "cuda":
        memory = used_memory().items()
        return [
            ("trainer.devices", _in_use(number, used, total))
            for number, (used, total) in memory
            if used > IN_USE * total
        ]
    why = why_no_gpu()
    if trainer.accelerator == "auto" and why.startswith(("the NVIDIA driver", "CUDA_VISIBLE_DEVICES")):
        return [("trainer.accelerator", f"runs on CPU: {why}")]
    return []


def _in_use(number: int, used: int, total: int) -> str:
    return (
        f"GPU {number} is in use: other processes hold {used / GIB:.1f} of its {total / GIB:.1f} GiB (nvidia-smi names "
        "them; CUDA_VISIBLE_DEVICES chooses others)"
    )
