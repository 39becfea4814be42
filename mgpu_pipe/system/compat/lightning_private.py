"""Private names of Lightning (checked against pytorch-lightning 2.6).

Lightning's own signal handling and its per-step signal broadcast are switched off: the step's own all-reduce
carries the stop flag (see ``MeshStrategy.run_step``), and a handler that runs collectives stalls.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, cast

import pytorch_lightning as pl
import torchmetrics.utilities.prints
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.loops.progress import _ProcessedTracker
from transformers.utils.logging import disable_progress_bar

_LOOP = "pytorch_lightning.loops.training_epoch_loop:_TrainingEpochLoop"
PRIVATE = (
    "pytorch_lightning:Trainer._signal_connector",
    "pytorch_lightning.trainer.connectors.signal_connector:_SignalConnector.register_signal_handlers",
    "lightning_utilities.core.rank_zero:rank_zero_only.rank",
    "torchmetrics.utilities.prints:rank_zero_only.rank",
    "pytorch_lightning.loops.progress:_ProcessedTracker",
    "pytorch_lightning.plugins.precision:Precision._after_closure",
    f"{_LOOP}._broadcast_sigterm_tensor",
    f"{_LOOP}._batches_that_stepped",
    f"{_LOOP}._skip_next_val",
    f"{_LOOP}.manual_optimization",
    f"{_LOOP}.batch_progress",
)
NEVER = 1 << 62


def quiet_libraries() -> None:
    """Hide hints about settings that this program decides, and progress bars of other libraries."""
    disable_progress_bar()
    for name in ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"pytorch_lightning\..*")
    warnings.filterwarnings("ignore", message=r"The `srun` command is available.*")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")


def imported_as(rank: int, local_rank: int) -> None:
    """Set the ranks that the libraries read from the environment only at import."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    torchmetrics.utilities.prints.rank_zero_only.rank = local_rank  # type: ignore[attr-defined]


def quiet_signals(trainer: pl.Trainer) -> None:
    """Disable signal handlers and the broadcast of the signal flag."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def start_at_step(trainer: pl.Trainer, step: int) -> None:
    """Let Lightning count optimizer steps and batches from ``step``, like an uninterrupted run."""
    loop = trainer.fit_loop.epoch_loop
    counter = loop.manual_optimization.optim_step_progress.total
    counter.ready = counter.completed = step
    batches = cast(_ProcessedTracker, loop.batch_progress.total)
    batches.ready = batches.started = batches.processed = batches.completed = step
    loop._batches_that_stepped = step


def evaluate_after_this_step(trainer: pl.Trainer, due: bool) -> None:
    """Decide whether Lightning's validation loop runs after the current batch."""
    trainer.val_check_batch = 1 if due else NEVER


def stop_after_this_step(trainer: pl.Trainer) -> None:
    """Stop the fit after this step, without Lightning's evaluation on an early stop."""
    trainer.should_stop = True
    trainer.fit_loop.epoch_loop._skip_next_val = True


def after_closure(strategy: Any, module: pl.LightningModule, optimizer: Any) -> None:
    """The hooks that Lightning calls between a closure and the optimizer's update."""
    strategy.precision_plugin._after_closure(module, optimizer)
