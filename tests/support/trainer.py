"""Lightning's trainer as the program makes it, for a process of a group."""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
import torch.distributed as dist

from mgpu_pipe.system.compat.lightning_private import NEVER, quiet_signals
from mgpu_pipe.training.strategy import EngineStrategy


def quiet_trainer(strategy: EngineStrategy, steps: int, callback: pl.Callback) -> pl.Trainer:
    """One that trains so many steps on this process of the group, and neither logs, saves, evaluates nor warns."""
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        val_check_interval=NEVER,
        check_val_every_n_epoch=None,
    )
    quiet_signals(trainer)
    return trainer
