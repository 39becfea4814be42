"""Checks of precision, offload and compilation against this machine. No torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import PathFinder

from mgpu_pipe.checks.model import model_fields
from mgpu_pipe.checks.toolchain import compiler, missing_compiler, missing_headers
from mgpu_pipe.config.hardware import cpu_is_fast_at_bf16, cpu_is_fast_at_fp16, gpu_capability, why_no_flash_attention_3
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.kernels.liger import obstacle
from mgpu_pipe.parallel.pipeline_streams import splits_backward

FP8_CAPABILITY = (8, 9)
"""The first GPUs with float8 matrix units (Ada, Hopper)."""
COMPILERS = ("g++", "c++", "clang++")


def numerics_errors(config: RunConfig) -> list[BadInputError]:
    """What this machine, or the mesh engine, cannot do."""
    own = (*_fp8_errors(config), *_flash_errors(config), *_liger_errors(config))
    return [*own, *_offload_errors(config), *_compile_errors(config)]


def emulated_type(config: RunConfig) -> str | None:
    """The 16-bit type that the run would compute in on a CPU without units for it; None where there are units."""
    if device_type(config) != "cpu":
        return None
    short = resolve_precision(config).removesuffix("_true")
    units: dict[str, Callable[[], bool]] = {"bf16": cpu_is_fast_at_bf16, "fp16": cpu_is_fast_at_fp16}
    return short if short in units and not units[short]() else None


def _fp8_errors(config: RunConfig) -> list[BadInputError]:
    if config.precision.name != "fp8":
        return []
    capability = gpu_capability() if device_type(config) == "cuda" else None
    if capability is None or capability < FP8_CAPABILITY:
        has = "there is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        reason = f"float8 needs a GPU of compute capability 8.9 or higher, and {has}"
        return [ConfigError("precision.name", "fp8", "use precision=bf16", reason)]
    if config.model.compile is False:
        reason = "float8 products are slower than bf16's where their scaling is not compiled"
        return [ConfigError("model.compile", False, "use auto or true, or precision=bf16", reason)]
    if PathFinder.find_spec("torchao") is None:
        reason = "float8 needs the package torchao"
        return [ConfigError("precision.name", "fp8", "install it (pip install torchao), or use precision=bf16", reason)]
    return []


def _flash_errors(config: RunConfig) -> list[BadInputError]:
    if config.model.flash_attention != "fa3" or not (why := why_no_flash_attention_3()):
        return []
    return [ConfigError("model.flash_attention", "fa3", "use fa2", why)]


def _liger_errors(config: RunConfig) -> list[BadInputError]:
    if config.model.kernels != "liger" or not (fields := model_fields(config)):
        return []
    found = obstacle(config, str(fields.get("model_type")), splits_backward(config.strategy))
    return [] if found is None else [ConfigError("model.kernels", "liger", found[1], found[0])]


def _offload_errors(config: RunConfig) -> list[BadInputError]:
    strategy = config.strategy
    if strategy.engine != "mesh" or strategy.offload == "none":
        return []
    if strategy.offload == "nvme":
        reason = "the mesh engine offloads to host memory only"
        return [ConfigError("strategy.offload", "nvme", "use strategy=zero3_nvme, or cpu", reason)]
    if device_type(config) == "cpu":
        reason = "on the CPU everything is in host memory already"
        return [ConfigError("strategy.offload", "cpu", "use none", reason)]
    return []


def _compile_errors(config: RunConfig) -> list[BadInputError]:
    return compile_errors() if config.model.compile is True and device_type(config) == "cpu" else []


def compile_errors() -> list[BadInputError]:
    """What is missing for torch.compile on the CPU."""
    what = ("model.compile", True, "torch.compile builds C++ code on the CPU")
    return [*(missing_compiler(*what) if compiler(COMPILERS) is None else ()), *missing_headers(*what)]
