"""A callback that makes steps last, so that a test can disturb a run between two of them."""

from __future__ import annotations

import time

from pytorch_lightning import Callback


class Slow(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(self.seconds)
