"""A callback that writes down how long each group of processes waits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, Trainer


class GroupTimeouts(Callback):
    """Args:
    folder: takes a file of each rank: the ranks of every group that it is in, and the group's timeout in seconds.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        found = []
        for group in dist.distributed_c10d._world.pg_map:
            backend = group._get_backend(torch.device("cpu"))
            found.append((dist.get_process_group_ranks(group), backend.options._timeout.total_seconds()))
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
