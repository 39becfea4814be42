"""Variables of a run's processes: CUDA's allocator, NCCL's flight recorder and the caches of compiled code."""

from __future__ import annotations

import os
from pathlib import Path

from mgpu_pipe.config.paths import cache_folder, compile_caches
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.data.cache import writing_to_cache

ALLOCATOR, ALLOCATOR_BEFORE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
TRACES = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path prefix of the flight recorder's files."""
GPU_DEFAULTS = {
    # Blocks grow in place, so micro-batches of different lengths cause no fragmentation.
    ALLOCATOR: "expandable_segments:True",
    # Keep each rank's last collectives, and write them if one hangs.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def gpu_environment(trainer: TrainerConfig) -> dict[str, str]:
    """Variables that the processes of a run get next to the present ones; none on the CPU."""
    if device_type(trainer) == "cpu":
        return {}
    chosen = {name: value for name, value in GPU_DEFAULTS.items() if name not in os.environ}
    if ALLOCATOR_BEFORE in os.environ:
        chosen.pop(ALLOCATOR, None)
    return chosen


def run_environment(trainer: TrainerConfig, cache_dir: str | None) -> dict[str, str]:
    """:func:`gpu_environment` and the variables of the caches of compiled code.

    Args:
        cache_dir: ``data.cache_dir``.

    Raises:
        ConfigError: other users can write into a cache, or it cannot be written.
    """
    with writing_to_cache(cache_folder(cache_dir)):
        return {**gpu_environment(trainer), **compile_caches(cache_dir, os.environ)}


def keep_traces_in(logs: Path) -> None:
    """Let NCCL's flight recorder write ``nccl-rank-<rank>`` next to the logs, for ``torchfrtrace``."""
    os.environ.setdefault(TRACES, str(logs / "nccl-rank-"))
