"""What a process holds while its optimizer runs, under the deepspeed engine."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from mgpu_pipe.parallel.device_memory import storage_bytes


class UpdateWatch(pl.Callback):
    """Measures weights, gradients and optimizer state whenever the optimizer is about to update something."""

    most = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        UpdateWatch.most = 0
        state = trainer.strategy.state

        def note(*_: object) -> None:
            held = storage_bytes([*state.held_weights(), *state.held_gradients(), *state.held_state()])
            UpdateWatch.most = max(UpdateWatch.most, held)

        trainer.strategy.optimizers[0].register_step_pre_hook(note)
