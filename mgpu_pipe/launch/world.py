"""The world of a process: its ranks, addresses and this process's place, its variables, and the store of its ranks.

Each start makes the same world: the launcher of this machine (:mod:`.local`), torchrun or srun with a process for each
rank (:mod:`.join`), and srun with a task for each node, which starts that node's workers (:mod:`.node`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_pipe.checks.devices import configured_interfaces
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.paths import cache_folder, compile_caches
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import TrainerConfig
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.errors import ConfigError, WorkerError
from mgpu_pipe.system.hardware import choose_threads

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_FD = "MGPU_STORE_FD"
ATTEMPT = "MGPU_ATTEMPT"
LOOPBACK = Path("/sys/class/net/lo")
POLL_S = 0.02
"""Seconds between two polls of the store."""


@dataclass(frozen=True)
class World:
    """Ranks of a world and this process's place among them; of a launcher, the place of its first worker.

    Attributes:
        local_world_size: ranks on this node.
        master_addr: address of rank 0's node.
        master_port: port of rank 0's store; 0 where the launcher makes the store.
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
    def on_this_machine(cls, processes: int) -> World:
        """World of workers that this process starts."""
        return cls(0, 0, processes, processes, "127.0.0.1", 0)

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

    def worker_variables(self, rank: int, port: int) -> dict[str, str]:
        """Variables of a worker, from which :meth:`from_environment` reads its world."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(rank // self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(port),
        }

    def with_workers(self, devices: int) -> World:
        """World of the workers that a world of node tasks starts, ``devices`` on each node."""
        return replace(
            self,
            rank=self.rank * devices,
            local_rank=0,
            world_size=self.world_size * devices,
            local_world_size=devices,
            master_port=0,
        )

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node_ranks(self) -> range:
        """Ranks of this node, of a launcher's world."""
        return range(self.rank, self.rank + self.local_world_size)

    @property
    def uses_file_store(self) -> bool:
        """Whether the launcher started all processes on this machine, so the store is a file, not a port."""
        return self.world_size > 1 and not self.master_port

    def thread_environment(self, threads: int | Literal["auto"]) -> dict[str, str]:
        """Variables of this node's ranks: compute threads, and gloo's network interface."""
        number = str(choose_threads(threads, self.local_world_size).per_worker)
        environment = {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
        if self.nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ and LOOPBACK.exists():
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo resolves the host's name, which may fail
        elif "GLOO_SOCKET_IFNAME" not in os.environ and not os.environ.get("NCCL_SOCKET_IFNAME", "^").startswith("^"):
            for name in (configured_interfaces("cuda") or [])[:1]:
                environment["GLOO_SOCKET_IFNAME"] = name  # GPU runs use gloo too, for votes on a stop and saves
        return environment


def enter(
    joined: Mapping[str, str], trainer: TrainerConfig, strategy: StrategyConfig, threads: int | Literal["auto"]
) -> World:
    """Make this process a rank of the ``joined`` world: sets its variables.

    Args:
        joined: see :func:`mgpu_pipe.system.joined_world.existing_world`.
        threads: ``launch.threads_per_worker``.

    Raises:
        ConfigError: the configuration does not fit the world.
    """
    os.environ.update(joined)
    world = World.from_environment(os.environ)
    check_world(world, trainer, strategy)
    os.environ.update(world.thread_environment(threads))
    return world


def check_world(world: World, trainer: TrainerConfig, strategy: StrategyConfig) -> None:
    """Check that the configuration fits the joined world."""
    there = f"the world that was joined has {world.world_size} processes, {world.local_world_size} on this node"
    devices = trainer.devices
    if devices != world.local_world_size and not (devices == "auto" and strategy.name != "single"):
        raise ConfigError("trainer.devices", devices, f"use {world.local_world_size}, or start as many", there)
    if trainer.num_nodes != world.nodes:
        raise ConfigError("trainer.num_nodes", trainer.num_nodes, f"use {world.nodes}", there)


def is_node_task(joined: Mapping[str, str], devices: int) -> bool:
    """Whether this process is an srun task per node with several workers to start; False under torchrun."""
    return joined.get("LOCAL_WORLD_SIZE") == "1" and devices > 1


def joined_store(timeout: float) -> Store:
    """Store of the world that this process's variables name; its ranks meet within ``timeout`` seconds, else
    WorkerError."""
    from torch.distributed import DistError, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    except DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorkerError(
            f"rank {os.environ.get('RANK')}: the ranks did not all meet at {place} within {timeout:g} s "
            f"({str(error).splitlines()[0][:200]}); start them all, check that every node reaches this port, or raise "
            "launch.collective_timeout"
        ) from error
    # torchrun's store survives a restart of the workers: separate the keys of each start
    return PrefixStore(f"mgpu_pipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def launcher_store(world: World, timeout: float) -> Store:
    """Store of launched workers: a file that no other process can open, or the launcher's bound socket."""
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


def wait_for(store: Store, keys: Sequence[str], timeout: float = math.inf) -> bool:
    """Wait for ``keys`` in the store, open to signals; False after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while not store.check(list(keys)):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


ALLOCATOR, ALLOCATOR_BEFORE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
TRACES = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path prefix of the flight recorder's files."""
GPU_DEFAULTS = {
    # CUDA numbers unlike GPUs by speed, the driver by their place; checks ask the driver.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
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
    """:func:`gpu_environment` and variables of the caches of compiled code; ConfigError if a cache is not safe or
    writable."""
    with writing_to_cache(cache_folder(cache_dir)):
        return {**gpu_environment(trainer), **compile_caches(cache_dir, os.environ)}


def keep_traces_in(logs: Path) -> None:
    """Let NCCL's flight recorder write ``nccl-rank-<rank>`` next to the logs, for ``torchfrtrace``."""
    os.environ.setdefault(TRACES, str(logs / "nccl-rank-"))
