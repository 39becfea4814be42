"""The process group of a run: where the store comes from, which backend, and a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.launch.gpus import Gpu, compare
from mgpu_pipe.launch.workers import ATTEMPT, STORE_FD

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class World:
    """This process's place among all.

    Attributes:
        store_fd: rank 0's listening socket, bound by the launcher; None in a world that was joined.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    attempt: int = 1
    store_fd: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        fd = environment.get(STORE_FD)
        return cls(
            rank=rank,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            world_size=world_size,
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            master_addr=environment["MASTER_ADDR"],
            master_port=int(environment.get("MASTER_PORT", 0)),
            attempt=int(environment.get(ATTEMPT, 1)),
            store_fd=None if fd is None else int(fd),
        )


def launcher_store(world: World, timeout: float) -> Store:
    """The store of locally launched workers, on a socket that the launcher bound, so that nobody takes its port."""
    from torch.distributed import HashStore, TCPStore

    if world.world_size == 1:
        if world.store_fd is not None:
            os.close(world.store_fd)
        return HashStore()
    return TCPStore(
        world.master_addr,
        world.master_port,
        world.world_size,
        is_master=world.rank == 0,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=world.store_fd,
        wait_for_workers=False,
    )


START_FAULTS = {
    "busy or unavailable": "its GPU is in use by another process, alone (nvidia-smi names it); use another one "
    "(CUDA_VISIBLE_DEVICES), or end that process",
    "no socket interface found": "NCCL finds no network interface; set NCCL_SOCKET_IFNAME to one that the nodes reach "
    "one another by (ip address lists them)",
}
"""What is told of the errors of CUDA and NCCL that have these words."""


@contextmanager
def _told_in_one_line(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        for words, told in START_FAULTS.items():
            if words in str(error):
                raise BadInputError(f"rank {rank} cannot start: {told}") from error
        raise


@contextmanager
def process_group(world: World, store: Store, device_type: str, timeout: float) -> Iterator[None]:
    """The default process group: gloo on ``cpu``, nccl on ``cuda``, where this rank's device is set as well.

    Args:
        timeout: seconds after which a collective fails that some rank did not join.
    """
    import torch
    import torch.distributed as dist

    device = None
    if device_type == "cuda":
        # srun may show each of a node's processes its own GPU alone
        device = torch.device("cuda", world.local_rank if torch.cuda.device_count() > 1 else 0)
        with _told_in_one_line(world.rank):
            torch.cuda.set_device(device)
            torch.zeros((), device=device)
        if world.world_size > 1:
            compare(store, world.rank, world.world_size, Gpu.current())
    limit = timedelta(seconds=timeout)
    # Device meshes give their groups no timeout, and torch's own is a module constant.
    dist.distributed_c10d.default_pg_timeout = limit
    if getattr(dist.distributed_c10d, "default_pg_nccl_timeout", None) is not None:
        dist.distributed_c10d.default_pg_nccl_timeout = limit
    with _told_in_one_line(world.rank):
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=limit,
            device_id=device,
        )
    yield
    # After an error the process ends as it is: destroying would wait for ranks that are gone.
    if world.world_size > 1:
        dist.barrier()  # rank 0 serves the store until all are done
    dist.destroy_process_group()
