"""Whether what a rank keeps between steps fits into its GPU at all. No torch."""

from __future__ import annotations

from mgpu_pipe.config.hardware import used_memory
from mgpu_pipe.config.resolve import device_type, resolve_precision, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.planner.memory import FP32, HALF, StateBytes, known_optimizer_bytes, savings, sharded_stage, state_bytes
from mgpu_pipe.planner.parameters import count_parameters
from mgpu_pipe.topology import BatchPlan, ParallelDims

GIB = 1 << 30
NAMED = 3
"""Settings that would help."""


def memory_errors(config: RunConfig, dims: ParallelDims, plan: BatchPlan, elsewhere: bool) -> list[ConfigError]:
    """An error where weights, gradients and optimizer state alone are more than this machine's smallest GPU holds.

    What activations and libraries take comes on top, so a run that passes may still run out of memory.
    """
    if elsewhere or config.launch.type != "local" or device_type(config) != "cuda":
        return []
    sizes = [total for _, total in used_memory().values()]
    kept = least_state(config, dims)
    if not sizes or kept is None or kept.total <= min(sizes):
        return []
    parts = {"weights": kept.weights, "gradients": kept.gradients, "optimizer": kept.optimizer, "activations": 0}
    helpful = sorted(savings(config, dims, plan, parts), key=lambda saving: -saving.size)[:NAMED]
    settings = [f"{saving.setting} (saves about {_gib(saving.size)})" for saving in helpful if saving.size > 0]
    fix = f"try {', '.join(settings)}" if settings else "use a smaller model"
    reason = (
        f"a rank keeps at least {_gib(kept.total)} (weights {_gib(kept.weights)}, gradients {_gib(kept.gradients)}, "
        f"optimizer {_gib(kept.optimizer)}), and its GPU has {_gib(min(sizes))}"
    )
    return [ConfigError("strategy.name", config.strategy.name, fix, reason)]


def least_state(config: RunConfig, dims: ParallelDims) -> StateBytes | None:
    """What a rank keeps on its device between steps, at least; None where that is not known without torch."""
    strategy, precision = config.strategy, resolve_precision(config)
    count = count_parameters(resolved_fields(config.model))
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
