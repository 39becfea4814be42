"""A callback that makes steps last, so that a test can disturb a run between two of them."""

from __future__ import annotations

import time

from pytorch_lightning import Callback, Trainer


class Slow(Callback):
    """Args:
    seconds: after each step.
    rank: the one that is slow; None: all are.
    """

    def __init__(self, seconds: float, rank: int | None = None) -> None:
        self.seconds, self.rank = seconds, rank

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self.rank in (None, trainer.global_rank):
            time.sleep(self.seconds)
