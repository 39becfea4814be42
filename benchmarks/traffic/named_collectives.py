"""Counts the collectives and messages of a training step by the function that starts them.

Bytes are those that a process sends, by the ring algorithms (see :mod:`benchmarks.traffic.collectives`): of a message
all, of an all-to-all what is not for itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from benchmarks.traffic.closed_forms import BACKWARD, FORWARD
from benchmarks.traffic.collectives import CollectiveCounter, _Mode
from mgpu_pipe.architectures.formulas.kept_memory import all_reduced, exchanged_bytes
from mgpu_pipe.training.tracing.phase_memory import group_size

FUNCTIONS = {
    # parallel.tensor.collectives
    "all_reduce_sum": "activations summed",
    "all_gather_sequence": "sequence gathered",
    "reduce_scatter_sequence": "sequence reduce-scattered",
    "all_gather_parts": "softmax of the vocabulary gathered",
    "all_reduce_together": "replicated gradients summed",
    # parallel.tensor.whole_towers
    "gather_shares": "features of pictures gathered",
    # parallel.context.ring and parallel.context.ulysses
    "pass_keys_and_values": "keys and values passed",
    "pass_key_and_value_gradients": "their gradients passed",
    "sequence_to_heads": "sequence to heads",
    "heads_to_sequence": "heads to sequence",
    # models.adapters.dora
    "_factors": "lengths of rows summed",
    # parallel.pipeline.schedule, optim.gradients and training.step_gradients
    "reduce_tied_gradients": "tied gradients exchanged",
    "counted_norm": "gradient norm",
    "_sum_flags": "used gradients",
    "_all_reduced": "loss and stop flag",
    # torch's FSDP2
    "foreach_all_gather": "weights gathered",
    "foreach_reduce": "gradients reduce-scattered",
}
"""What is sent, by the innermost of these functions on the stack."""
BY_THE_CLOCK = "should_leave"
"""Votes on whether to stop between micro-batches: as many as the last step's time says, four bytes each, of the host.
"""
PIPELINE = "_batch_p2p"
"""torch's schedules send by it."""
HALVES = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
"""Of the whole, all but this process's part."""


class _NamedMode(_Mode):
    def _count(self, operation: str, args: tuple[Any, ...]) -> None:
        if operation == "recv_":
            return  # counted where it is sent
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        size = group_size([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)])
        largest = max(tensor.nbytes for tensor in tensors)
        name = _name(operation, args)
        if name == BY_THE_CLOCK:
            return
        if operation == "allreduce_":
            share = all_reduced(largest, size)
        elif operation in HALVES:
            share = exchanged_bytes(largest, size)
        elif operation == "send":
            share = largest
        else:
            raise RuntimeError(f"{operation}, called for {name}: no closed form knows what it sends")
        self._counted.calls[name] += 1
        self._counted.sent[name] += share  # type: ignore[assignment]


class NamedCounter(CollectiveCounter):
    """Counts one step of the run that it is a callback of, by :data:`FUNCTIONS`."""

    mode = _NamedMode


def _name(operation: str, args: tuple[Any, ...]) -> str:
    frame = sys._getframe(1)
    while frame is not None:
        function = frame.f_code.co_name
        if function in FUNCTIONS:
            return FUNCTIONS[function]
        if function == BY_THE_CLOCK:
            return BY_THE_CLOCK
        if function == PIPELINE:
            group = dist.ProcessGroup.unbox(args[1])
            return FORWARD if int(args[2]) > group.rank() else BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(f"{operation} is started by no function that has a name here")
