"""What CUDA's allocator held when a rank ran out of memory: every segment and block, as JSON in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mgpu_pipe.config.replace_file import replace_file

GIB = 1 << 30
FREE = "inactive"
"""State of a block that is in no use."""


def write_snapshot(file: Path) -> str:
    """Write it, and say in words how much of what is held is free.

    Raises:
        OSError: it cannot be written.
    """
    segments = torch.cuda.memory_snapshot()
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(segments, default=str))
    return f"GPU memory: {summary(segments)}; all blocks: {file}"


def summary(segments: list[dict[str, Any]]) -> str:
    """Memory that is held, that is used, and the largest block that is free: much in small blocks is fragmentation."""
    held = sum(segment["total_size"] for segment in segments)
    used = sum(segment["allocated_size"] for segment in segments)
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == FREE]
    return (
        f"held {held / GIB:.2f} GiB, used {used / GIB:.2f} GiB, "
        f"largest free block {max(free, default=0) / GIB:.2f} GiB of {sum(free) / GIB:.2f} GiB"
    )
