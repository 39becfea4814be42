"""Lightning's Trainer as this project uses it, and the run's own with its callbacks and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import Profiler

from mgpu_pipe.config.plugins import STRATEGY_GROUP
from mgpu_pipe.config.targets.build_target import build
from mgpu_pipe.objectives.registry import load_subclass
from mgpu_pipe.system.compat.lightning_private import NEVER, quiet_signals
from mgpu_pipe.training.loggers import start_loggers
from mgpu_pipe.training.recorder import StepRecorder
from mgpu_pipe.training.strategy import EngineStrategy

if TYPE_CHECKING:
    from mgpu_pipe.training.attempt import Attempt

ROTARY_BUFFER = "inv_freq"
"""How the names of transformers' buffers of rotary frequencies end."""


def set_tf32(model: torch.nn.Module, allowed: bool) -> None:
    """Let the fp32 products and convolutions of this process on CUDA use TF32, or not.

    The angles of rotary embeddings stay fp32 products: they are positions times frequencies, and TF32 tells positions
    above 2048 from their neighbours no more.
    """
    _allow_tf32(allowed)
    if not allowed:
        return
    for module in model.modules():
        if any(name.endswith(ROTARY_BUFFER) for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_pre_hook(lambda *_: _allow_tf32(False))
            module.register_forward_hook(lambda *_: _allow_tf32(True), always_call=True)


def _allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def strategy_class(engine: str) -> type[EngineStrategy]:
    """The class that ``strategy.engine`` names; ConfigError if it is no whole subclass of ``EngineStrategy``."""
    if engine == "mesh":
        from mgpu_pipe.training.mesh import MeshStrategy

        return MeshStrategy
    if engine == "deepspeed":
        from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy

        return DeepSpeedStrategy
    registered: type[EngineStrategy] = load_subclass("strategy.engine", engine, STRATEGY_GROUP, EngineStrategy)
    return registered


def run_trainer(
    attempt: Attempt, strategy: EngineStrategy, recorder: StepRecorder, profiler: Profiler | None
) -> pl.Trainer:
    """The Trainer of a run, with its configuration's callbacks and, on rank 0, loggers."""
    config, device = attempt.config, attempt.device
    callbacks = [
        build(node, "pytorch_lightning.Callback", f"callbacks.{name}") for name, node in config.callbacks.items()
    ]
    loggers = start_loggers(config, attempt.paths.root, attempt.dims) if attempt.rank == 0 else []
    sees_one = device.type == "cuda" and torch.cuda.device_count() == 1  # of a node's several, under srun
    return bare_trainer(
        accelerator=device.type,
        devices=1 if sees_one else attempt.world_size // config.trainer.num_nodes,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy,
        max_steps=attempt.max_steps,
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
