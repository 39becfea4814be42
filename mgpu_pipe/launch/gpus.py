"""Compares the GPUs of all ranks before NCCL starts, which would hang or abort on a mismatch."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.compile_caches import compile_caches
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.resolve import AMPERE, device_type
from mgpu_pipe.config.schema import RunConfig, TrainerConfig
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.runs.lock import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store


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
    """Variables that the processes of ``config`` get next to the present ones; none on the CPU."""
    if device_type(trainer) == "cpu":
        return {}
    chosen = {name: value for name, value in GPU_DEFAULTS.items() if name not in os.environ}
    if ALLOCATOR_BEFORE in os.environ:
        chosen.pop(ALLOCATOR, None)
    return chosen


def run_environment(config: RunConfig) -> dict[str, str]:
    """:func:`gpu_environment` and the variables of the caches of compiled code.

    Raises:
        ConfigError: other users can write into a cache, or it cannot be written.
    """
    cache = cache_folder(config.data.cache_dir)
    with writing_to_cache(cache):
        return {**gpu_environment(config.trainer), **compile_caches(config.data.cache_dir, os.environ)}


def keep_traces_in(logs: Path) -> None:
    """Let NCCL's flight recorder write ``nccl-rank-<rank>`` next to the logs, for ``torchfrtrace``."""
    os.environ.setdefault(TRACES, str(logs / "nccl-rank-"))


SEEN, JUDGED = "gpu", "gpus"


@dataclass(frozen=True)
class Gpu:
    """The GPU of a rank.

    Attributes:
        machine: identity of the running system, shared by containers of one machine.
        capability: compute capability.
    """

    node: str
    machine: str
    uuid: str
    name: str
    capability: tuple[int, int]

    @classmethod
    def current(cls) -> Gpu:
        import torch

        seen = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(socket.gethostname(), boot_id(), str(seen.uuid), seen.name, (seen.major, seen.minor))


def compare(store: Store, rank: int, world_size: int, gpu: Gpu) -> None:
    """Check that the GPUs of all ranks can train together; rank 0 decides. A collective call.

    Raises:
        BadInputError: on every rank, if they cannot.
    """
    store.set(f"{SEEN}/{rank}", json.dumps(asdict(gpu)))
    if rank == 0:
        records = [json.loads(store.get(f"{SEEN}/{other}")) for other in range(world_size)]
        gpus = [Gpu(**{**record, "capability": tuple(record["capability"])}) for record in records]
        store.set(JUDGED, fault(gpus))
        if len({gpu.name for gpu in gpus}) > 1:
            print_line(f"note: {_kinds(gpus)}: a step takes as long as on the slowest", file=sys.stderr, flush=True)
    if mismatch := store.get(JUDGED).decode():
        raise BadInputError(mismatch)


def fault(gpus: Sequence[Gpu]) -> str:
    """Reason why ranks with these ``gpus`` cannot train together; empty if they can."""
    seen: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        other = seen.setdefault((gpu.machine, gpu.uuid), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} see the same GPU ({gpu.name} {gpu.uuid} of node {gpu.node}): start one "
                "process for each GPU, and leave CUDA_VISIBLE_DEVICES alone or give every process its own"
            )
    if len({gpu.capability >= AMPERE for gpu in gpus}) > 1:
        return f"{_kinds(gpus)}: some compute in bf16 and some do not; use nodes of one kind"
    return ""


def _kinds(gpus: Sequence[Gpu]) -> str:
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        first.setdefault(gpu.name, rank)
    return "the ranks see different GPUs: " + ", ".join(f"{name} (from rank {rank} on)" for name, rank in first.items())
