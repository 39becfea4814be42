"""Agreement between ranks, without pickle: JSON through an all-gather of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.errors import CheckpointSaveError


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` (None: the world) and the group's size; one process where there is no world."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def exchange_json(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's ``value``, in the order of ranks. A collective call.

    Args:
        value: anything that JSON has; floats keep every bit, tuples become lists.
    """
    text = json.dumps(value, allow_nan=False).encode()
    _, size = rank_and_size(group)
    if size == 1:
        return [json.loads(text)]
    device = _device_of(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(count) for count in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(text[:count].cpu().numpy().tobytes()) for text, count in zip(texts, counts, strict=True)]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    backend = str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def together(action: Callable[[], object], what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Run one part of a save on every rank, and go on only if it succeeded on all. A collective call.

    Args:
        action: this rank's part; what it returns (JSON) is what the others get.
        what: what failed, in an error's words.

    Returns:
        Every rank's result, in the order of ranks.

    Raises:
        CheckpointSaveError: on all ranks, with the first failing rank's message. On a failing rank its own
            exception is the cause.
    """
    cause: Exception | None = None
    reply: dict[str, object] = {}
    try:
        reply["result"] = action()
    except Exception as error:  # whatever it is, the others must not wait for this rank for ever
        cause = error
        reply["error"] = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    replies = exchange_json(reply, group)
    for rank, other in enumerate(replies):
        if "error" in other:
            raise CheckpointSaveError(f"{what} (rank {rank}: {other['error']})") from cause
    return [other["result"] for other in replies]
