"""Process group of a rank: compares the GPUs of all ranks, sets the backend, and ends the group.

NCCL would hang or abort on GPUs that do not fit.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mgpu_pipe.config.resolve import AMPERE
from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.launch import gloo_guard
from mgpu_pipe.launch.world import World
from mgpu_pipe.runs.lock import boot_id

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

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
    """Check that the GPUs of all ranks can train together; rank 0 decides, BadInputError on all. Collective."""
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


START_FAULTS = {
    "busy or unavailable": "its GPU is in use by another process, alone (nvidia-smi names it); use another one "
    "(CUDA_VISIBLE_DEVICES), or end that process",
    "no socket interface found": "NCCL finds no network interface; set NCCL_SOCKET_IFNAME to one that the nodes reach "
    "one another by (ip address lists them)",
}
"""Explanations of CUDA and NCCL errors by words in their message."""


@contextmanager
def _explained_start_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        for words, explanation in START_FAULTS.items():
            if words in str(error):
                raise BadInputError(f"rank {rank} cannot start: {explanation}") from error
        raise


@contextmanager
def process_group(world: World, store: Store, device_type: str, timeout: float) -> Iterator[torch.device]:
    """Default process group, gloo on ``cpu`` and nccl on ``cuda``, with a timeout; sets and gives this rank's
    device."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.system.compat.torch_private import gloo_groups_built_by

    device = None
    if device_type == "cuda":
        # srun may show each process of a node a single GPU
        device = torch.device("cuda", world.local_rank if torch.cuda.device_count() > 1 else 0)
        with _explained_start_errors(world.rank):
            torch.cuda.set_device(device)
            torch.zeros((), device=device)
        if world.world_size > 1:
            compare(store, world.rank, world.world_size, Gpu.current())
    limit = timedelta(seconds=timeout)
    # Device meshes set no timeout for their groups; torch's default is a module constant.
    dist.distributed_c10d.default_pg_timeout = limit
    if getattr(dist.distributed_c10d, "default_pg_nccl_timeout", None) is not None:
        dist.distributed_c10d.default_pg_nccl_timeout = limit
    with gloo_groups_built_by(gloo_guard.build) if world.uses_file_store else nullcontext():
        with _explained_start_errors(world.rank):
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=limit,
                device_id=device,
            )
        yield device or torch.device("cpu")
        # After an error the group is not destroyed: that would wait for ranks that are gone.
        if world.world_size > 1:
            dist.barrier()  # rank 0 serves the store until all ranks are done
        dist.destroy_process_group()
