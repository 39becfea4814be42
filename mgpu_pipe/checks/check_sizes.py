"""Checks that the sizes of strategy, world, batch and model fit, and that this machine can offload; without torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any

from mgpu_pipe.architectures.family import CONFIGS
from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.architectures.formulas.kept_memory import FP32, optimizer_bytes, state_bytes
from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.checks.devices import compiler, missing_compiler, missing_headers
from mgpu_pipe.checks.model_axes import model_axis_errors, router_loss_errors
from mgpu_pipe.checks.optimizer import optimizer_errors
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.plugins import ENGINES, STRATEGY_GROUP, entry_names
from mgpu_pipe.config.resolve import device_type, devices_per_node, resolve_precision, world_size
from mgpu_pipe.config.schema import (
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    TrainerConfig,
)
from mgpu_pipe.config.suggest import VALUES
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_fields, resolved_fields
from mgpu_pipe.planning.memory_limits import memory_errors
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.local_files import exists, expand_home, is_folder
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import ENGINE, deepspeed_errors

LIMITS = {
    "at_least": (ge, "of at least"),
    "above": (gt, "above"),
    "at_most": (le, "of at most"),
    "below": (lt, "below"),
}


def range_errors(config: object) -> list[ConfigError]:
    """Errors of numbers outside the limits in their fields' metadata."""
    return list(_range_errors(config, ""))


def _range_errors(node: object, path: str) -> Iterator[ConfigError]:
    """Errors below a dataclass or a mapping, whose key is ``path``."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _range_errors(value, f"{path}.{name}")
    if not is_dataclass(node):
        return
    for field in fields(node):
        value, key = getattr(node, field.name), f"{path}.{field.name}" if path else field.name
        yield from _range_errors(value, key)
        for limit, edge in field.metadata.items():
            if limit in LIMITS and isinstance(value, int | float) and not isinstance(value, bool):
                within, words = LIMITS[limit]
                if not within(value, edge):
                    meant = VALUES.get(key, {}).get(str(value))
                    fix = f"use {meant}" if meant else f"use a number {words} {edge}{field.metadata.get('or', '')}"
                    yield ConfigError(key, value, fix, "no such number" if meant else "")


def size_errors(config: RunConfig, elsewhere: bool = False) -> list[BadInputError]:
    """Errors of strategy, world and batch; ``elsewhere`` for another machine with GPUs, too."""
    errors = strategy_errors(config)
    if not errors:
        try:
            dims = ParallelDims.from_config(config.trainer, config.strategy)
            plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
            errors += _router_errors(config.model, config.objective)
            errors += _reduction_errors(config.precision, config.strategy, config.trainer, dims, plan)
            fields = model_fields(config.model)
            errors += _part_errors(config.strategy, config.data, dims, fields)
            if config.strategy.engine == "mesh" and fields:
                errors += model_axis_errors(config, dims, plan, fields)
            errors += [] if errors else memory_errors(config, elsewhere)
        except ConfigError as error:
            errors.append(error)
    return errors


def update_errors(config: RunConfig) -> list[ConfigError]:
    """Errors of the optimizer on the strategy's sizes; none if :func:`size_errors` reports the strategy."""
    if strategy_errors(config):
        return []
    try:
        dims = ParallelDims.from_config(config.trainer, config.strategy)
        BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    except ConfigError:
        return []
    return optimizer_errors(config.optimizer, config.strategy, config.trainer, dims)


def strategy_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of the engine, and of a strategy that is one process."""
    if config.strategy.engine == ENGINE:
        return [*deepspeed_errors(config.strategy, config.precision, config.model), *offload_errors(config)]
    return _mesh_errors(config.trainer, config.strategy)


def _mesh_errors(trainer: TrainerConfig, strategy: StrategyConfig) -> list[BadInputError]:
    if strategy.engine not in ENGINES and strategy.engine not in (others := entry_names(STRATEGY_GROUP)):
        fix = f"use {' or '.join((*ENGINES, *others))}; or install the package that brings it"
        return [ConfigError("strategy.engine", strategy.engine, fix, "no such engine")]
    if strategy.name == "single" and strategy.dp_replicate == strategy.dp_shard == 1 != world_size(trainer, strategy):
        key, value = "trainer.num_nodes", trainer.num_nodes
        if trainer.devices != 1 and trainer.devices != "auto":
            key, value = "trainer.devices", trainer.devices
        return [ConfigError(key, value, "use 1, or strategy=ddp", "strategy=single is one process")]
    return []


def _router_errors(model: ModelConfig, objective: ObjectiveConfig) -> list[BadInputError]:
    model_type = model_fields(model).get("model_type")
    coefficient = getattr(objective, "router_aux_loss", 0.0)
    return list(router_loss_errors(str(model_type), coefficient)) if model_type and coefficient else []


def _reduction_errors(
    precision: PrecisionConfig, strategy: StrategyConfig, trainer: TrainerConfig, dims: ParallelDims, plan: BatchPlan
) -> list[ConfigError]:
    """Errors of ``precision.reduce=bf16`` where it would round more than the sent gradients."""
    one_micro_batch = f"data.micro_batch_size={plan.samples_per_process}"
    key, computes = "precision.reduce", resolve_precision(precision, trainer)
    if precision.reduce == "fp32":
        return []
    if computes in ("fp32", "fp16"):
        return [ConfigError(key, "bf16", "use fp32, or precision=bf16", f"the run computes in {computes}")]
    holder = "pipeline stages" if dims.pp > 1 else "replicas"
    if (dims.pp > 1 or dims.dp_replicate > 1) and strategy.engine == "mesh" and plan.num_micro_batches > 1:
        fix = "use fp32, or strategy=fsdp" + (f", or {one_micro_batch}" if dims.pp == 1 else "")
        reason = f"{holder} would sum up {plan.num_micro_batches} micro-batches in bf16 too"
        return [ConfigError(key, "bf16", fix, reason)]
    return []


def _part_errors(
    strategy: StrategyConfig, data: DataConfig, dims: ParallelDims, fields: Mapping[str, Any]
) -> list[ConfigError]:
    """Errors of ``strategy.parts``: towers whole under tensor parallelism, or that keep what it recomputes."""
    errors = []
    for part in strategy.parts.whole if fields else ():
        reasons = _reasons_to_cut(data, dims, part, str(fields.get("model_type")), fields.get(CONFIGS[part]))
        if reason := next(iter(reasons), ""):
            errors.append(ConfigError(f"strategy.parts.{part}", "whole", "leave it out", reason))
    recompute, towers = strategy.parts.activation_checkpointing, [CONFIGS["vision"], CONFIGS["audio"]]
    if recompute != "same" and fields:
        key, fix = "strategy.parts.activation_checkpointing", "use same, or strategy.activation_checkpointing"
        if not any(isinstance(fields.get(tower), Mapping) for tower in towers):
            errors.append(ConfigError(key, recompute, fix, f"the {fields.get('model_type')} family has no tower"))
        elif strategy.engine != "mesh":
            errors.append(ConfigError(key, recompute, fix, "ZeRO recomputes all blocks alike"))
    return errors


def _reasons_to_cut(data: DataConfig, dims: ParallelDims, part: str, model_type: str, tower: object) -> list[str]:
    """Reasons why this part cannot stay whole, or would not be cut."""
    families = families_with(lambda family: part in family.tower_outputs)
    has_families = f"these keep one whole: {', '.join(families)}" if families else "no family keeps one whole"
    cached = getattr(data, "cache_features", False)
    candidates = [
        (f"the {model_type} family has no {part} tower; {has_families}", not isinstance(tower, Mapping)),
        (
            f"no {part} tower of the {model_type} family was tried; {has_families}",
            part not in family_of(model_type).tower_outputs,
        ),
        ("strategy.tp=1 cuts no tower", dims.tp == 1),
        ("data.cache_features=true runs the tower before the first step", part == "vision" and cached),
    ]
    return [reason for reason, applies in candidates if applies]


COMPILE_TIMEOUT_S = 60
COMPILES = "DeepSpeed compiles an extension"
AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_destroy(0) == 1; }\n"


def offload_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of everything that the deepspeed engine and this configuration's offload lack."""
    errors: list[BadInputError] = []
    if importlib.util.find_spec("deepspeed") is None:
        reason = "DeepSpeed is not installed"
        errors.append(ConfigError("strategy.engine", "deepspeed", "install it: pip install deepspeed", reason))
    if config.strategy.offload == "nvme":
        nodes = max(1, config.trainer.num_nodes)
        needed = offloaded_bytes(config.model, config.objective, config.optimizer, nodes)
        errors += [*_path_errors(config.strategy, config.trainer, needed), *compiler_errors()]
        if device_type(config.trainer) == "cuda" and not _has_cuda_headers():
            reason = "DeepSpeed compiles its file access against CUDA's headers"
            errors.append(ConfigError("strategy.offload", "nvme", "install the CUDA toolkit, or set CUDA_HOME", reason))
    return errors


def _has_cuda_headers() -> bool:
    """Whether the CUDA toolkit is where torch's extension builder looks for it."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return bool(named or shutil.which("nvcc") or is_folder(Path("/usr/local/cuda")))


def offloaded_bytes(
    model: ModelConfig, objective: ObjectiveConfig, optimizer: OptimizerConfig, nodes: int
) -> int | None:
    """Disk bytes of a node's ranks, fp32 weights and gradients included; None if the size is unknown without torch."""
    fields = {**resolved_fields(model), **objective.model_fields()}
    count = count_parameters(fields, description(objective.name).model_class)
    if count is None:
        return None
    return state_bytes(FP32 * count.total, count.total, nodes, optimizer=optimizer_bytes(optimizer)).total


def _path_errors(strategy: StrategyConfig, trainer: TrainerConfig, needed: int | None) -> Iterator[BadInputError]:
    """Errors of the folder for offloaded state, of ``needed`` bytes a node; None where they are not known."""
    key, folder = "strategy.offload_path", strategy.offload_path
    if folder is None:
        yield ConfigError(key, None, "give a folder on the NVMe disk", "strategy.offload=nvme writes to one")
        return
    path = expand_home(folder)
    if not is_folder(path):
        reason = "it is not a folder" if exists(path) else "no such folder"
        yield ConfigError(key, folder, "make the folder, or give another", reason)
        return
    if not _writable(path):
        yield ConfigError(key, folder, "give a folder that can be written", "it cannot be written")
        return
    free = shutil.disk_usage(path).free
    if needed is not None and needed > free:
        reason = (
            f"the optimizer state of {devices_per_node(trainer, strategy)} processes takes "
            f"{needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        )
        yield ConfigError(key, folder, "give a larger disk, or use strategy.offload=cpu", reason)


def _writable(folder: Path) -> bool:
    """Whether a file can be written there, by writing one: permissions do not show a read-only mount, nor bind root."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


def compiler_errors() -> Iterator[BadInputError]:
    """Errors of missing tools for DeepSpeed's compiled file access: a compiler, Python's headers, ninja, libaio."""
    key, value = "strategy.offload", "nvme"
    cxx = compiler()
    if cxx is None:
        yield from missing_compiler(key, value, COMPILES)
    yield from missing_headers(key, value, COMPILES)
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        yield ConfigError(key, value, "install it: pip install ninja", f"{COMPILES}, and ninja is not installed")
    if cxx is not None and not _has_libaio(cxx):
        fix = "install libaio (Debian and Ubuntu: apt-get install libaio-dev; Fedora: libaio-devel)"
        yield ConfigError(key, value, fix, "DeepSpeed reads and writes through libaio, which is not here")


def _has_libaio(cxx: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        program = [cxx, "-x", "c++", "-", "-laio", "-o", str(Path(folder) / "program")]
        done = subprocess.run(
            bind_command(program), input=AIO_PROGRAM, text=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
        )
    return done.returncode == 0
