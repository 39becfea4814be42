"""Process group of a run: its store, its backend and its end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.launch import gloo_guard
from mgpu_pipe.launch.gpus import Gpu, compare
from mgpu_pipe.launch.workers import ATTEMPT, STORE_FD

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class World:
    """Rank and world of this process.

    Attributes:
        store_fd: the launcher's store file, or rank 0's listening socket; None in a joined world.
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

    @property
    def uses_file_store(self) -> bool:
        """Whether the launcher started all processes on this machine, so the store is a file, not a port."""
        return self.world_size > 1 and not self.master_port


def launcher_store(world: World, timeout: float) -> Store:
    """Store of launched workers: on one machine a file that no other process can open.

    Workers of several nodes use a socket that the launcher bound, so no other process can take its port.
    """
    from torch.distributed import FileStore, HashStore, TCPStore

    if world.world_size == 1:
        if world.store_fd is not None:
            os.close(world.store_fd)
        return HashStore()
    if world.uses_file_store:
        assert world.store_fd is not None
        os.set_inheritable(world.store_fd, False)
        store = FileStore(f"/proc/self/fd/{world.store_fd}", world.world_size)
        store.set_timeout(timedelta(seconds=timeout))
        return store
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
def process_group(world: World, store: Store, device_type: str, timeout: float) -> Iterator[None]:
    """Default process group: gloo on ``cpu``, nccl on ``cuda``, where it also sets this rank's device.

    Args:
        timeout: seconds after which a collective fails if a rank did not join.
    """
    import torch
    import torch.distributed as dist

    from mgpu_pipe.system.compat.torch_gloo_private import gloo_groups_built_by

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
        yield
        # After an error the group is not destroyed: that would wait for ranks that are gone.
        if world.world_size > 1:
            dist.barrier()  # rank 0 serves the store until all ranks are done
        dist.destroy_process_group()
