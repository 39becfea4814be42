"""Bytes of weights, gradients, optimizer state and activations on a rank, savings of settings, and bytes it sends.

A collective sends by ring algorithms (Thakur et al. 2005) over n processes: an all-gather, a reduce-scatter or an
all-to-all of S bytes S(n-1)/n, an all-reduce twice that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_pipe.config.group_keys import OptimizerConfig, StrategyConfig
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import RunConfig, TrainerConfig
from mgpu_pipe.topology import AXES, BatchPlan, ParallelDims

FP32, HALF = 4, 2
ADAM_STATE = 2 * FP32
"""Bytes of Adam's two moments per parameter."""
OPTIMIZER_STATE = {"SGD": FP32, "Adagrad": FP32, "ASGD": FP32, "RMSprop": FP32, "AdamWBf16": FP32}
"""Bytes of state per parameter, by class (AdamWBf16 has two moments of two bytes); Adam's for others."""
ADAMS = ("Adam", "AdamW")
SPLIT_BYTES, SHARED_BYTES = 24, 10
"""Bytes of activations per token, width and layer in half precision with fused attention: those that tensor parallelism
splits, and those that only sequence parallelism splits (Korthikanti et al. 2022, arXiv:2205.05198,
equations 2 and 4)."""

AUTO_CHUNK_BYTES = 64 << 20
AUTO_CHUNK_BYTES_GPU = 256 << 20
"""Larger on GPUs, whose matrix products reach full speed at about a thousand rows."""
GPU_TILE = 128
"""Multiple of rows in which GPUs compute matrix products."""


def optimizer_bytes(optimizer: OptimizerConfig) -> int:
    """Bytes of optimizer state per trained parameter, with its moving average."""
    state = OPTIMIZER_STATE.get(optimizer._target_.rpartition(".")[2], ADAM_STATE)
    return state + (FP32 if optimizer.ema.decay is not None else 0)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's weights, gradients and optimizer state."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    weights: int, trained: int, shards: int, stage: int = 3, *, gradient: int = FP32, optimizer: int = ADAM_STATE
) -> StateBytes:
    """State of a rank (Rajbhandari et al. 2020, arXiv:1910.02054).

    Args:
        weights: bytes of all weights.
        trained: number of parameters with a gradient.
        stage: ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 (and FSDP2) also weights. ZeRO-1 accumulates
            all gradients until the last pass of a step batch, then keeps this rank's.
        gradient: bytes of a parameter's gradient.
        optimizer: bytes of its optimizer state, with master weights of lower precision.
    """
    return StateBytes(
        weights=weights // (shards if stage > 2 else 1),
        gradients=gradient * trained // (shards if stage > 1 else 1),
        optimizer=optimizer * trained // shards,
    )


def activation_bytes(tokens: int, width: int, layers: int) -> int:
    """Bytes that the layers' forward pass of a micro-batch stores for its backward pass, in fp32."""
    return 2 * (SPLIT_BYTES + SHARED_BYTES) * tokens * width * layers


def chunk_rows(setting: int | str, vocabulary: int, rows: int, gpu_item: int | None = None) -> int:
    """Rows of logits at once; 0 means all, ``auto`` 64 MiB of float32 logits, or 256 MiB of ``gpu_item`` bytes each on
    a GPU."""
    if setting != "auto":
        return min(int(setting), rows) if setting else rows
    if gpu_item is None:
        return max(1, min(rows, AUTO_CHUNK_BYTES // (4 * vocabulary)))
    fitting = AUTO_CHUNK_BYTES_GPU // (gpu_item * vocabulary)
    return max(1, min(rows, fitting - fitting % GPU_TILE if fitting > GPU_TILE else fitting))


@dataclass(frozen=True)
class Saving:
    """Setting and the approximate bytes per rank that it saves."""

    setting: str
    size: int


def savings(config: RunConfig, dims: ParallelDims, plan: BatchPlan, parts: Mapping[str, int]) -> list[Saving]:
    """Approximate savings per rank of settings that are not in use yet.

    Args:
        parts: bytes of the rank's ``weights``, ``gradients``, ``optimizer`` and ``activations``.
    """
    options: list[Saving] = []
    activations = parts["activations"]
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    micro, strategy = plan.micro_batch_size, config.strategy
    if micro > 1:
        smaller = max(n for n in range(1, micro) if plan.samples_per_process % n == 0)
        options.append(Saving(f"data.micro_batch_size={smaller}", activations * (micro - smaller) // micro))
    if strategy.activation_checkpointing != "full":
        # A block's inputs, and one block at a time, remain: about a fifth for usual depths.
        options.append(Saving("strategy.activation_checkpointing=full", activations * 4 // 5))
    if dims.tp > 1 and not strategy.sequence_parallel:
        shared = SHARED_BYTES / (SHARED_BYTES + SPLIT_BYTES / dims.tp)
        options.append(Saving("strategy.sequence_parallel=true", int(activations * shared * (1 - 1 / dims.tp))))
    stage = sharded_stage(config.strategy)
    if dims.uses_model_axes:
        options += _savings_of_more_ranks(config.strategy, config.trainer, dims, state)
    elif dims.dp_replicate > 1:
        # A typed size overrides a preset.
        prefix = "" if strategy.dp_replicate == "auto" else " strategy.dp_replicate=1"
        options.append(Saving(f"strategy=fsdp{prefix}", state * (dims.dp_replicate - 1) // dims.dp_replicate))
    elif stage < 3:
        sharded = parts["weights"] + (parts["gradients"] if stage == 1 else 0)
        options.append(Saving("strategy=zero3", sharded * (dims.dp_shard - 1) // dims.dp_shard))
    elif dims.dp_shard == 1:
        options.append(Saving("strategy=fsdp trainer.devices=2", state // 2))
    else:
        devices = dims.world_size // config.trainer.num_nodes
        options.append(Saving(f"trainer.devices={2 * devices}", state // 2))
    offloads = dims.dp_shard > 1 and not dims.uses_model_axes
    if device_type(config.trainer) == "cuda" and offloads and strategy.offload == "none":
        options.append(Saving("strategy.offload=cpu", state))
    if config.optimizer._target_.rpartition(".")[2] in ADAMS and strategy.engine == "mesh":
        options.append(Saving("optimizer=adamw_bf16", parts["optimizer"] // 2))
    if config.model.path is not None and config.peft.name == "none":
        options.append(Saving("peft=lora", parts["gradients"] + parts["optimizer"]))
    if resolve_precision(config.precision, config.trainer) == "fp32":
        options.append(Saving("precision=bf16", activations // 2))
    return options


def _savings_of_more_ranks(
    strategy: StrategyConfig, trainer: TrainerConfig, dims: ParallelDims, state: int
) -> list[Saving]:
    """Savings of more ranks for the state of a model that is already cut."""
    if dims.dp_replicate > 1:
        shards = dims.dp_replicate * dims.dp_shard
        return [Saving(f"strategy.dp_replicate=1 strategy.dp_shard={shards}", state - state // dims.dp_replicate)]
    axes = [axis for axis in AXES if getattr(strategy, axis) == "auto"]
    axis = axes[0] if axes else "dp_shard"
    prefix = "" if axes else f"strategy.{axis}={2 * getattr(dims, axis)} "
    if axis == "dp_replicate":
        return []
    devices = 2 * dims.world_size // trainer.num_nodes
    return [Saving(f"{prefix}trainer.devices={devices}", state // 2)]


def sharded_stage(strategy: StrategyConfig) -> int:
    """ZeRO stage of ``dp_shard``; FSDP2 shards all."""
    return strategy.deepspeed.stage if strategy.engine == "deepspeed" else 3


def exchanged_bytes(size: float, ranks: int) -> float:
    """Bytes that a process sends in an all-gather, reduce-scatter or all-to-all of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def all_reduced(size: float, ranks: int) -> float:
    """Bytes that a process sends in an all-reduce of ``size`` bytes."""
    return 2 * size * (ranks - 1) / ranks
