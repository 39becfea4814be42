"""What is told of a GPU's memory. Oracle: segments as torch describes them, made up, since no GPU is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.training.rank_memory import GIB, write_snapshot


def test_what_is_free_and_in_how_large_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(used: int, *free: int) -> dict[str, Any]:
        blocks = [{"size": used, "state": "active_allocated"}, *({"size": size, "state": "inactive"} for size in free)]
        return {"total_size": used + sum(free), "allocated_size": used, "blocks": blocks}

    segments = [segment(4 * GIB, GIB, GIB // 2), segment(2 * GIB)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    file = tmp_path / "profile" / "memory-rank-3.json"
    told = "held 7.50 GiB, used 6.00 GiB, largest free block 1.00 GiB of 1.50 GiB"
    assert write_snapshot(file) == f"GPU memory: {told}; all blocks: {file}"
    assert json.loads(file.read_text()) == segments
