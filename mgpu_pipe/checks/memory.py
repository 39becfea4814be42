"""Checks that a rank's state between steps fits into its GPU or host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from mgpu_pipe.architectures.formulas.kept_memory import (
    FP32,
    HALF,
    Saving,
    StateBytes,
    known_optimizer_bytes,
    savings,
    sharded_stage,
    state_bytes,
)
from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.checks.model import model_fields
from mgpu_pipe.checks.optimizer import ADAMW_BF16
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.resolve import device_type, resolve_precision, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.hardware import host_memory, used_memory
from mgpu_pipe.topology import BatchPlan, ParallelDims

GIB = 1 << 30
NAMED = 3
"""Most settings in a fix."""


def memory_errors(config: RunConfig, dims: ParallelDims, plan: BatchPlan, elsewhere: bool) -> list[ConfigError]:
    """An error if weights, gradients and optimizer state exceed the smallest GPU, or for CPU processes the host memory.

    Activations and libraries need more, so a run that passes may still run out of memory.
    """
    on_cpu = device_type(config) == "cpu"
    if config.launch.type != "local" or elsewhere:
        return []
    processes = world_size(config) // max(1, config.trainer.num_nodes) if on_cpu else 1
    sizes = [host_memory()] if on_cpu else [total for _, total in used_memory().values()]
    state = min_state_bytes(config, dims)
    if not sizes or state is None or state.total * processes <= min(sizes):
        return []
    machine = _Machine(on_cpu, min(sizes), gpus=max(len(sizes), world_size(config) // max(1, config.trainer.num_nodes)))
    fitting = _fitting_settings(config, dims, plan, state, machine)
    settings = [f"{saving.setting} (saves about {_gib(saving.size)})" for saving in fitting[:NAMED]]
    fix = f"try {', '.join(settings)}" if settings else _needed(config, machine)
    has = f"and its GPU has {_gib(min(sizes))}"
    if on_cpu:
        has = f"and this machine has {_gib(min(sizes))} for {processes} process{'es' if processes > 1 else ''}"
    reason = (
        f"a rank keeps at least {_gib(state.total)} (weights {_gib(state.weights)}, gradients {_gib(state.gradients)}, "
        f"optimizer {_gib(state.optimizer)}), {has}"
    )
    return [ConfigError("strategy.name", config.strategy.name, fix, reason)]


@dataclass(frozen=True)
class _Machine:
    """This machine's memory for a run.

    Attributes:
        size: bytes of the smallest GPU, or for all CPU processes together.
        gpus: number of GPUs; for CPU processes the larger of 1 and their number.
    """

    on_cpu: bool
    size: int
    gpus: int


def _fitting_settings(
    config: RunConfig, dims: ParallelDims, plan: BatchPlan, state: StateBytes, machine: _Machine
) -> list[Saving]:
    """Settings with which the state fits by the same formula, largest saving first; pairs if no single one fits."""
    parts = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer, "activations": 0}
    options = [saving.setting for saving in savings(config, dims, plan, parts) if saving.size > 0]
    if not machine.on_cpu and not dims.uses_model_axes:  # more processes of one machine have no more memory
        numbers = (number for number in (2, 4, 8, 16) if dims.world_size < number <= machine.gpus)
        options += [f"strategy=fsdp trainer.devices={number}" for number in numbers]
    pairs = [f"{first} {second}" for first, second in combinations(dict.fromkeys(options), 2)]
    for settings in (list(dict.fromkeys(options)), pairs):
        fitting = []
        for setting in settings:
            remaining = _state_bytes_with(config, setting, machine)
            if remaining is not None and remaining < state.total:
                fitting.append(Saving(setting, state.total - remaining))
        if fitting:
            return sorted(fitting, key=lambda saving: -saving.size)
    return []


def _state_bytes_with(config: RunConfig, setting: str, machine: _Machine) -> int | None:
    """Lower bound of a rank's state with a setting, in bytes; None if it does not fit or is unknown."""
    try:
        changed = _changed(config, setting)
        dims = ParallelDims.resolve(changed.strategy, world_size(changed))
    except ConfigError:
        return None
    processes = world_size(changed) // max(1, changed.trainer.num_nodes)
    if processes > machine.gpus and not machine.on_cpu:
        return None
    trains_adapters, offloads = changed.peft.name != "none", changed.strategy.offload != "none"
    full_config = replace(
        changed,
        peft=PeftConfig(),
        strategy=replace(changed.strategy, offload="none"),
        model=replace(changed.model, freeze=["*"] if trains_adapters else changed.model.freeze),
    )
    state = min_state_bytes(full_config, dims)
    if state is None or state.total * (processes if machine.on_cpu or offloads else 1) > (
        host_memory() if offloads else machine.size
    ):
        return None
    return 0 if offloads else state.total


def _changed(config: RunConfig, setting: str) -> RunConfig:
    """``config`` with the overrides of one of :func:`mgpu_pipe.architectures.formulas.kept_memory.savings`."""
    trainer, strategy, optimizer, peft = config.trainer, config.strategy, config.optimizer, config.peft
    for word in setting.split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        if key == "strategy" and value == "fsdp":
            strategy = replace(strategy, name="fsdp", engine="mesh", dp_replicate=1, dp_shard="auto")
        elif key == "strategy":
            strategy = replace(strategy, name=value, deepspeed=replace(strategy.deepspeed, stage=3))
        elif key == "optimizer":
            optimizer = replace(optimizer, _target_=ADAMW_BF16)
        elif key == "peft":
            peft = replace(peft, name="lora")
        elif section == "trainer":
            trainer = replace(trainer, devices=int(value))
        elif section == "strategy":
            strategy = replace(strategy, **{name: int(value) if value.isdigit() else value})  # type: ignore[arg-type]
    return replace(config, trainer=trainer, strategy=strategy, optimizer=optimizer, peft=peft)


def _needed(config: RunConfig, machine: _Machine) -> str:
    """The fix that names the memory or GPUs needed for fully sharded state."""
    one_process = replace(
        config,
        trainer=replace(config.trainer, devices=1, num_nodes=1),
        strategy=replace(
            config.strategy, name="fsdp", engine="mesh", dp_replicate=1, dp_shard=1, tp=1, pp=1, cp=1, ep=1
        ),
    )
    state = min_state_bytes(one_process, ParallelDims())
    assert state is not None
    if machine.on_cpu:
        return f"use a smaller model, or a machine with more than {_gib(state.total)} and strategy=fsdp"
    gpus = -(-state.total // machine.size)
    return (
        f"use a smaller model, or at least {gpus} such GPUs with strategy=fsdp, which keep {_gib(state.total)} together"
    )


def check_host_memory(config: RunConfig) -> None:
    """Refuse a run whose CPU processes keep more state than this machine's memory."""
    dims = ParallelDims.resolve(config.strategy, world_size(config))
    for error in memory_errors(config, dims, BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp), False):
        raise error


def min_state_bytes(config: RunConfig, dims: ParallelDims) -> StateBytes | None:
    """Lower bound of a rank's state on its device between steps; None if it is unknown without torch."""
    strategy, precision = config.strategy, resolve_precision(config)
    fields = model_fields(config)
    count = count_parameters(fields) if fields else None
    if count is None or strategy.offload != "none" or config.peft.name != "none":
        return None
    trained = 0 if config.model.freeze else count.total
    shards, optimizer = world_size(config) // dims.dp_replicate, known_optimizer_bytes(config.optimizer)
    if strategy.engine == "mesh":
        weight = HALF if precision == "bf16_true" else FP32
        gradient = HALF if config.precision.reduce == "bf16" else weight
        if precision == "bf16_true":
            optimizer //= 2
        return state_bytes(weight * count.total, trained, shards, gradient=gradient, optimizer=optimizer)
    if strategy.engine == "deepspeed":
        weight, master = (HALF, FP32) if precision == "bf16" else (FP32, 0)
        stage = sharded_stage(config)
        return state_bytes(weight * count.total, trained, shards, stage, gradient=0, optimizer=master + optimizer)
    return None


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
