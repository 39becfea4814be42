"""The process group of a run: where the store comes from, which backend, and a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

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
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    # Device meshes give their groups no timeout, and torch's own is a module constant.
    dist.distributed_c10d.default_pg_timeout = limit
    if getattr(dist.distributed_c10d, "default_pg_nccl_timeout", None) is not None:
        dist.distributed_c10d.default_pg_nccl_timeout = limit
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
