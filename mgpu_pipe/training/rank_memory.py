"""Each rank's peak of memory and its parts, and what would help a rank that ran out of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mgpu_pipe.architectures.formulas.kept_memory import (
    activation_bytes,
    optimizer_bytes,
    savings,
    sharded_stage,
    state_bytes,
)
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.planning import memory as planned_memory
from mgpu_pipe.system.local_files import replace_file

if TYPE_CHECKING:
    from mgpu_pipe.training.attempt import Attempt

GIB = 1 << 30
PARTS = ("weights", "gradients", "optimizer", "activations")
ACTIVATIONS = ("activations", "activations of the tower", "loss head", "backward pass of a block")
"""Terms of :func:`mgpu_pipe.planning.memory.memory_by_rank` that come and go with a micro-batch's activations."""
SHOWN = 3
"""Settings named to a user who ran out of memory."""


class OutOfMemoryError(MgpuError):
    """A rank ran out of memory; names the rank, the largest part and what would help. Exit code 1."""


def memory_by_rank(parts: Mapping[str, int], peak_gib: float, device: torch.device) -> dict[str, list[float]]:
    """GiB of every rank: ``peak_gib``, its parts, and ``other_gib``, the rest. A collective call.

    ``other`` is what libraries, buffers, gathered weights and temporary tensors take; on the CPU, where the peak is
    the process's, also the program itself.
    """
    known = {f"{name}_gib": parts.get(name, 0) / GIB for name in PARTS}
    return by_rank({"peak_gib": peak_gib, **known, "other_gib": max(0.0, peak_gib - sum(known.values()))}, device)


def by_rank(mine: Mapping[str, float], device: torch.device) -> dict[str, list[float]]:
    """Gather each figure of every rank; all ranks pass the same names. A collective call."""
    table = torch.zeros(dist.get_world_size(), len(mine), dtype=torch.float64, device=device)
    table[dist.get_rank()] = torch.tensor([*mine.values()], dtype=torch.float64)
    dist.all_reduce(table)
    return dict(zip(mine, table.t().tolist(), strict=True))


ALLOCATION_FAILED = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of errors by the host's allocator, by CUDA outside torch's allocator, by NCCL and by cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILED)


def out_of_memory(
    error: BaseException, attempt: Attempt, model: torch.nn.Module, parts: Mapping[str, int]
) -> OutOfMemoryError:
    """The error for the user, from the ``parts`` of memory that were measured, the rest estimated."""
    known = estimated_parts(attempt, model, parts)
    largest = max(known, key=lambda name: known[name])
    possible = savings(attempt.config, attempt.dims, attempt.plan, known)
    helpful = sorted(possible, key=lambda saving: -saving.size)[:SHOWN]
    fixes = ", ".join(f"{saving.setting} (saves about {_gib(saving.size)})" for saving in helpful if saving.size > 0)
    rest = ", ".join(f"{name} {_gib(size)}" for name, size in known.items() if name != largest)
    said = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    advice = f"try {fixes}" if fixes else "use a smaller model or a machine with more memory"
    return OutOfMemoryError(
        f"rank {attempt.rank} ran out of memory; the largest part is {largest}, about {_gib(known[largest])} ({rest}); "
        f"{advice} [{said}]"
    )


def estimated_parts(attempt: Attempt, model: torch.nn.Module, parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes per rank of each part: measured where known, else from the closed form."""
    strategy, optimizer = attempt.config.strategy, attempt.config.optimizer
    # A parameter that DeepSpeed has partitioned is empty, and keeps its size in ``ds_numel``.
    sizes = {p: int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()}
    shards = attempt.dims.world_size // attempt.dims.dp_replicate
    if any(isinstance(p, DTensor) for p in sizes):  # cut and sharded already: what is here is this rank's
        sizes = {p: (p.to_local() if isinstance(p, DTensor) else p).numel() for p in sizes}
        shards = 1
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    weights = sum(size * p.element_size() for p, size in sizes.items())
    state = state_bytes(weights, trained, shards, sharded_stage(strategy), optimizer=optimizer_bytes(optimizer))
    estimated = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": _activations(attempt, model),
    }
    return {name: parts.get(name) or estimated[name] for name in PARTS}


def _activations(attempt: Attempt, model: Any) -> int:
    """Bytes of what a forward pass keeps, as ``check`` predicts them; where it cannot, those of plain blocks."""
    try:
        predicted = planned_memory.memory_by_rank(attempt.config)
    except BadInputError:  # the out-of-memory error must not be lost
        predicted = None
    if predicted is not None:
        return sum(predicted.terms.get(name, 0) for name in ACTIVATIONS)
    fields = model.config.get_text_config()
    tokens = attempt.plan.micro_batch_size * attempt.config.data.seq_len
    return activation_bytes(tokens, fields.hidden_size, fields.num_hidden_layers)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.0f} MiB"


FREE = "inactive"
"""State of an unused block."""


def write_snapshot(file: Path) -> str:
    """Write the allocator's snapshot; returns a line on its memory. OSError if it cannot be written."""
    segments = torch.cuda.memory_snapshot()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(segments, default=str))
    return f"GPU memory: {summary(segments)}; all blocks: {file}"


def summary(segments: list[dict[str, Any]]) -> str:
    """A line of reserved and used memory and the largest free block; many small free blocks are fragmentation."""
    reserved = sum(segment["total_size"] for segment in segments)
    used = sum(segment["allocated_size"] for segment in segments)
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == FREE]
    return (
        f"held {reserved / GIB:.2f} GiB, used {used / GIB:.2f} GiB, "
        f"largest free block {max(free, default=0) / GIB:.2f} GiB of {sum(free) / GIB:.2f} GiB"
    )
