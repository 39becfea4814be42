"""Each rank's peak of memory and its parts, and what would help a rank that ran out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.validate import device_type, resolve_precision
from mgpu_pipe.errors import MgpuError
from mgpu_pipe.topology import AXES, BatchPlan, ParallelDims

GIB = 1 << 30
PARTS = ("weights", "gradients", "optimizer", "activations")
SHOWN = 3
"""Settings named to a user who ran out of memory."""
ADAM_STATES = 2
"""Moments that the usual optimizers keep a parameter, where they do not exist yet."""


class OutOfMemoryError(MgpuError):
    """A rank ran out of memory; names the rank, the largest part and what would help. Exit code 1."""


def memory_by_rank(parts: Mapping[str, int], peak_gib: float, device: torch.device) -> dict[str, list[float]]:
    """GiB of every rank: ``peak_gib``, its parts, and ``other_gib``, the rest. A collective call.

    ``other`` is what libraries, buffers, gathered weights and temporary tensors take; on the CPU, where the peak is
    the process's, also the program itself.
    """
    values = [parts.get(name, 0) / GIB for name in PARTS]
    mine = [peak_gib, *values, max(0.0, peak_gib - sum(values))]
    table = torch.zeros(dist.get_world_size(), len(mine), dtype=torch.float64, device=device)
    table[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(table)
    names = ["peak_gib", *(f"{name}_gib" for name in PARTS), "other_gib"]
    return dict(zip(names, table.t().tolist(), strict=True))


ALLOCATION_FAILED = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors of the host's allocator, of CUDA outside of torch's, of NCCL and of cuBLAS say."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILED)


@dataclass(frozen=True)
class Saving:
    """A setting and about how many bytes a rank it saves."""

    setting: str
    size: int


def out_of_memory(
    error: BaseException,
    rank: int,
    config: RunConfig,
    dims: ParallelDims,
    plan: BatchPlan,
    model: Any,
    parts: Mapping[str, int],
) -> OutOfMemoryError:
    """The error to tell the user, from what the rank held.

    Args:
        parts: as far as they were measured; the rest is estimated from the model's parameters.
    """
    known = estimated_parts(model, dims, plan, config.data.seq_len, parts, _stage(config))
    largest = max(known, key=lambda name: known[name])
    helpful = sorted(savings(config, dims, plan, known), key=lambda saving: -saving.size)[:SHOWN]
    fixes = ", ".join(f"{saving.setting} (saves about {_gib(saving.size)})" for saving in helpful if saving.size > 0)
    rest = ", ".join(f"{name} {_gib(size)}" for name, size in known.items() if name != largest)
    said = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    advice = f"try {fixes}" if fixes else "use a smaller model or a machine with more memory"
    return OutOfMemoryError(
        f"rank {rank} ran out of memory; the largest part is {largest}, about {_gib(known[largest])} ({rest}); "
        f"{advice} [{said}]"
    )


def estimated_parts(
    model: Any, dims: ParallelDims, plan: BatchPlan, seq_len: int, parts: Mapping[str, int], stage: int = 3
) -> dict[str, int]:
    """Bytes a rank of each part: measured where they are known, else from the closed form.

    Args:
        stage: what ``dp_shard`` shards: 1 the optimizer's state, 2 gradients too, 3 (and FSDP2) weights too.
    """
    # A parameter that DeepSpeed has partitioned is empty, and keeps its size in ``ds_numel``.
    sizes = {p: int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()}
    shards = dims.world_size // dims.dp_replicate
    if any(isinstance(p, DTensor) for p in sizes):  # cut and sharded already: what is here is this rank's
        sizes = {p: (p.to_local() if isinstance(p, DTensor) else p).numel() for p in sizes}
        shards = 1
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    whole = sum(size * p.element_size() for p, size in sizes.items())
    config = model.config.get_text_config()
    tokens = plan.micro_batch_size * seq_len
    # Activations of a layer in half precision, attention by a fused kernel: 34 bytes a token and width
    # (Korthikanti et al. 2022, arXiv:2205.05198, equation 2); twice that in fp32; and the logits in fp32.
    layers = 2 * 34 * tokens * config.hidden_size * config.num_hidden_layers
    guessed = {
        "weights": whole // (shards if stage == 3 else 1),
        "gradients": 4 * trained // (shards if stage > 1 else 1),
        "optimizer": 4 * ADAM_STATES * trained // shards,
        "activations": layers,
    }
    return {name: parts.get(name) or guessed[name] for name in PARTS}


def savings(config: RunConfig, dims: ParallelDims, plan: BatchPlan, parts: Mapping[str, int]) -> list[Saving]:
    """What each setting that is not in use yet would save a rank, about."""
    found: list[Saving] = []
    activations = parts["activations"]
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    micro, strategy = plan.micro_batch_size, config.strategy
    if micro > 1:
        smaller = max(n for n in range(1, micro) if plan.samples_per_process % n == 0)
        found.append(Saving(f"data.micro_batch_size={smaller}", activations * (micro - smaller) // micro))
    if strategy.activation_checkpointing != "full":
        # What stays: a block's inputs, and one block at a time; about a fifth for the usual depths.
        found.append(Saving("strategy.activation_checkpointing=full", activations * 4 // 5))
    if dims.tp > 1 and not strategy.sequence_parallel:
        # What lies between the tensor-parallel regions: 10 of the 10 + 24 / tp bytes a token and width that are kept
        # (Korthikanti et al. 2022, arXiv:2205.05198, equations 2 and 4).
        between = 10 / (10 + 24 / dims.tp)
        found.append(Saving("strategy.sequence_parallel=true", int(activations * between * (1 - 1 / dims.tp))))
    if dims.uses_model_axes:
        found += _more_ranks(config, dims, state)
    elif dims.dp_replicate > 1:
        found.append(Saving("strategy=fsdp", state * (dims.dp_replicate - 1) // dims.dp_replicate))
    elif _stage(config) < 3:
        sharded = parts["weights"] + (parts["gradients"] if _stage(config) == 1 else 0)
        found.append(Saving("strategy=zero3", sharded * (dims.dp_shard - 1) // dims.dp_shard))
    elif dims.dp_shard == 1:
        found.append(Saving("strategy=fsdp trainer.devices=2", state // 2))
    else:
        devices = dims.world_size // config.trainer.num_nodes
        found.append(Saving(f"trainer.devices={2 * devices}", state // 2))
    offloads = dims.dp_shard > 1 and not dims.uses_model_axes
    if device_type(config) == "cuda" and offloads and strategy.offload == "none":
        found.append(Saving("strategy.offload=cpu", state))
    if resolve_precision(config) == "fp32":
        found.append(Saving("precision=bf16", activations // 2))
    return found


def _more_ranks(config: RunConfig, dims: ParallelDims, state: int) -> list[Saving]:
    """What spreading the state of a model that is cut over further ranks saves."""
    if dims.dp_replicate > 1:
        shards = dims.dp_replicate * dims.dp_shard
        return [Saving(f"strategy.dp_replicate=1 strategy.dp_shard={shards}", state - state // dims.dp_replicate)]
    axes = [axis for axis in AXES if getattr(config.strategy, axis) == "auto"]
    axis = axes[0] if axes else "dp_shard"
    given = "" if axes else f"strategy.{axis}={2 * getattr(dims, axis)} "
    if axis == "dp_replicate":
        return []
    devices = 2 * dims.world_size // config.trainer.num_nodes
    return [Saving(f"{given}trainer.devices={devices}", state // 2)]


def _stage(config: RunConfig) -> int:
    """What ``dp_shard`` shards, as a ZeRO stage; FSDP2 shards all."""
    return config.strategy.deepspeed.stage if config.strategy.engine == "deepspeed" else 3


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.0f} MiB"
