"""Lightning's Trainer as this project uses it, and the run's own with its callbacks and loggers."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.profilers import Profiler

from mgpu_pipe.compat.lightning_private import NEVER, quiet_signals
from mgpu_pipe.config.build import build
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.strategies.base import EngineStrategy
from mgpu_pipe.training.loggers import start_loggers
from mgpu_pipe.training.recorder import StepRecorder


def run_trainer(
    config: RunConfig,
    paths: RunPaths,
    strategy: EngineStrategy,
    recorder: StepRecorder,
    max_steps: int,
    device: torch.device,
    rank: int,
    profiler: Profiler | None = None,
) -> pl.Trainer:
    """The Trainer of a run, with its configuration's callbacks and, on rank 0, loggers."""
    callbacks = [
        build(node, "pytorch_lightning.Callback", f"callbacks.{name}") for name, node in config.callbacks.items()
    ]
    loggers = start_loggers(config, paths.root) if rank == 0 else []
    sees_one = device.type == "cuda" and torch.cuda.device_count() == 1  # of a node's several, under srun
    return bare_trainer(
        accelerator=device.type,
        devices=1 if sees_one else dist.get_world_size() // config.trainer.num_nodes,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy,
        max_steps=max_steps,
        logger=loggers or False,
        callbacks=[*callbacks, recorder],
        profiler=profiler,
    )


def bare_trainer(**options: Any) -> pl.Trainer:
    """Lightning's Trainer without what this project does itself: checkpoints, progress, sampling, signals."""
    trainer = pl.Trainer(
        **options,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=NEVER,
        inference_mode=False,
    )
    quiet_signals(trainer)
    return trainer
