"""Counts the collectives of a training step by name, and the bytes that each process sends.

Bytes are those of the ring algorithms (see :mod:`mgpu_pipe.architectures.formulas.kept_memory`); a reduction to one
process passes its bytes along a chain that ends there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_pipe.architectures.formulas.kept_memory import all_reduced, exchanged_bytes
from mgpu_pipe.training.tracing.phase_memory import group_size

STEP = 2
"""The step that is counted; the first builds what later ones reuse."""
NAMES = {
    "_allgather_base_": "weights gathered",
    "allgather_into_tensor_coalesced_": "weights gathered",
    "_reduce_scatter_base_": "gradients reduce-scattered",
    "reduce_scatter_tensor_coalesced_": "gradients reduce-scattered",
}


@dataclass
class Counted:
    """Of one process and step."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


class _Mode(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: tuple[Any, ...]) -> None:
        messages = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args]
        size = group_size([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)])
        largest = max((tensor for message in messages for tensor in message), key=lambda tensor: tensor.nbytes)
        share = exchanged_bytes(max(sum(tensor.nbytes for tensor in message) for message in messages), size)
        name = NAMES.get(operation, operation)
        if operation == "allreduce_":
            name, share = _all_reduced(largest), all_reduced(largest.nbytes, size)
        elif operation == "reduce_":
            name, share = "gradients reduced", 0 if _root(args) == torch.distributed.get_rank() else largest.nbytes
        elif operation in ("send", "recv_"):
            share = largest.nbytes if operation == "send" else 0
        elif operation == "scatter_" and _root(args) != torch.distributed.get_rank():
            share = 0
        self._counted.calls[name] += 1
        self._counted.sent[name] += share  # type: ignore[assignment]


def _root(args: tuple[Any, ...]) -> int:
    """Of ``reduce_`` and ``scatter_``, whose fourth argument it is (torch/csrc/distributed/c10d/Ops.cpp)."""
    return int(args[3])


def _all_reduced(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.uint8:
        return "overflow flag"
    if tensor.dtype != torch.float64:
        return "gradients all-reduced"
    return "gradient norm" if tensor.numel() == 1 else "loss, stop flag and used gradients"


class CollectiveCounter(pl.Callback):
    """Counts one step of the run that it is a callback of; the last run's count is in :attr:`last`."""

    last: Counted = Counted()
    mode = _Mode

    def __init__(self) -> None:
        self._mode: _Mode | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.step + 1 == STEP:
            CollectiveCounter.last = Counted()
            self._mode = self.mode(CollectiveCounter.last)
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
