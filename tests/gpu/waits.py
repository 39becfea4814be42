"""A callback that counts what a step should not do: wait for its device, and compile anew."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback

WAITS = "called a synchronizing CUDA operation"


class CountWaits(Callback):
    """Args:
    file: a list for each step, the waits in it and the graphs that were compiled so far, as JSON.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._counted: list[tuple[int, int]] = []
        self._watching = False
        self._caught: Any = None

    def on_train_batch_start(self, *_: object) -> None:
        self._watching = torch.cuda.is_available()
        if self._watching:
            self._caught = warnings.catch_warnings(record=True)
            self._told = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: object) -> None:
        waits = 0
        if self._watching:
            torch.cuda.set_sync_debug_mode("default")
            waits = sum(WAITS in str(one.message) for one in self._told)
            self._caught.__exit__(None, None, None)
        from torch._dynamo.utils import counters

        self._counted.append((waits, counters["stats"]["unique_graphs"]))

    def on_train_end(self, *_: object) -> None:
        self._file.write_text(json.dumps(self._counted))
