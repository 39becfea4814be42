"""Lightning callbacks that spoil the disk under a run's checkpoints, for runs in processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytorch_lightning as pl

from mgpu_pipe.checkpoint import file_operations as files


class FullDisk(pl.Callback):
    """The disk is full, by the kernel's own error, while ``rank`` writes the checkpoints of ``steps``."""

    def __init__(self, steps: list[int], rank: int = 0) -> None:
        self.folders = {f"step-{step:08d}.partial" for step in steps}
        self.rank = rank

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        create = files.create

        def create_there(path: Path) -> int:
            full = path.parent.name in self.folders and trainer.global_rank == self.rank
            return os.open("/dev/full", os.O_WRONLY) if full else create(path)

        files.create = create_there


class SlowDisk(pl.Callback):
    """Every write takes ``seconds`` more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        write = files.write

        def write_slowly(descriptor: int, data: files.Buffer) -> None:
            time.sleep(self.seconds)
            write(descriptor, data)

        files.write = write_slowly
