"""Values that ranks exchange as JSON, outside of a step's tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` (None: the world) and the group's size; ``0, 1`` without a world."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def exchange_json(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's JSON ``value`` in order; floats keep every bit, tuples become lists. A collective call."""
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
