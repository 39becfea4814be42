"""A callback that makes steps last, so that a test can disturb a run between two of them."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
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


class SlowLink(Callback):
    """Args:
    ranks: two, whose messages take their time.
    rate: bytes per second.
    """

    def __init__(self, ranks: list[int], rate: float) -> None:
        self.ranks, self.rate = set(ranks), rate

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        send: Any = dist.ProcessGroup.send

        def slowed(group: Any, tensors: list[Any], to: int, *more: Any) -> Any:
            if {trainer.global_rank, dist.get_process_group_ranks(group)[to]} == self.ranks:
                time.sleep(sum(tensor.nbytes for tensor in tensors) / self.rate)
            return send(group, tensors, to, *more)

        dist.ProcessGroup.send = slowed  # type: ignore[method-assign, assignment]
