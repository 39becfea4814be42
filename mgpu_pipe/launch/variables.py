"""Variables of CUDA, NCCL and torch that processes on GPUs get, where the user has not set them. No torch.

NCCL itself finds NVLink and InfiniBand, and chooses by what it finds: it is told nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig

ALLOCATOR, ALLOCATOR_BEFORE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
TRACES = "TORCH_FR_DUMP_TEMP_FILE"
"""Names the flight recorder's files, before the rank."""
ON_GPUS = {
    # Blocks grow in place: micro-batches of different lengths leave no holes that nothing fits in.
    ALLOCATOR: "expandable_segments:True",
    # The last collectives of each rank are kept, and written where one of them does not end.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def gpu_environment(config: RunConfig) -> dict[str, str]:
    """What the processes of ``config`` get beside what there is; nothing on the CPU."""
    if device_type(config) == "cpu":
        return {}
    chosen = {name: value for name, value in ON_GPUS.items() if name not in os.environ}
    if ALLOCATOR_BEFORE in os.environ:
        chosen.pop(ALLOCATOR, None)
    return chosen


def keep_traces_in(logs: Path) -> None:
    """Have NCCL's flight recorder write beside the logs: ``nccl-rank-<rank>``, for ``torchfrtrace``."""
    os.environ.setdefault(TRACES, str(logs / "nccl-rank-"))
