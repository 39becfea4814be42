"""A Lightning callback that ruins a run's weights after one step, for runs in processes of their own."""

from __future__ import annotations

import pytorch_lightning as pl
import torch


class Ruin(pl.Callback):
    """After the update of ``step``, every weight is ``value`` times what it was: finite still, or not."""

    def __init__(self, step: int, value: float | str) -> None:
        self.step, self.value = step, float(value)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            for parameter in pl_module.parameters():
                parameter.mul_(self.value)
