"""Lightning's view of the process group that exists already."""

from __future__ import annotations

import os

import torch.distributed as dist
from pytorch_lightning.plugins.environments import ClusterEnvironment


class ExistingWorld(ClusterEnvironment):
    """Ranks and sizes of the default process group; Lightning starts no process and picks no port."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Keep the process group's size."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Keep the process group's rank."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))
