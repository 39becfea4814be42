"""Strategies over one or two processes, and what a case has for them."""

from __future__ import annotations

from typing import Any

from mgpu_pipe.topology import ParallelDims

WAYS: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "single": (ParallelDims(), {}),
    "ddp 2": (ParallelDims(dp_replicate=2), {}),
    "fsdp 2": (ParallelDims(dp_shard=2), {}),
    "tp 2": (ParallelDims(tp=2), {}),
    "pp 2": (ParallelDims(pp=2), {"micro_batches": 2}),
    "cp 2": (ParallelDims(cp=2), {}),
    "zero1 2": (ParallelDims(dp_shard=2), {"zero_stage": 1}),
    "zero2 2": (ParallelDims(dp_shard=2), {"zero_stage": 2}),
    "zero3 2": (ParallelDims(dp_shard=2), {"zero_stage": 3}),
    "zero2_cpu 2": (ParallelDims(dp_shard=2), {"zero_stage": 2, "offload": "cpu"}),
    "zero3_cpu 2": (ParallelDims(dp_shard=2), {"zero_stage": 3, "offload": "cpu"}),
}
