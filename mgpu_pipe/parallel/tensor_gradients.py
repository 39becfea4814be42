"""Gradients of parameters that several tensor-parallel ranks hold, where each rank has a part of the sum only.

Norms under sequence parallelism see a part of the sequence on each rank; norms of heads see this rank's heads; a
key-value head that several ranks hold serves this rank's queries. Each is summed once a step batch, not once a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

PARTIAL = "mgpu_partial_gradients"
"""The attribute of a root module that holds, by parameter name, the ranks to sum over; None is the whole axis."""
FLATTEN_BYTES = 64 << 20
"""What one collective sums, at most, unless one gradient is larger."""

Sharers = dist.ProcessGroup | None


def add_partial_gradients(model: nn.Module, partial: Mapping[str, Sharers]) -> None:
    """Record parameters of the root module ``model`` whose gradients are parts of a sum."""
    model.__dict__[PARTIAL] = {**partial_gradients(model), **partial}


def partial_gradients(model: nn.Module) -> Mapping[str, Sharers]:
    """What :func:`add_partial_gradients` recorded."""
    return model.__dict__.get(PARTIAL, {})


@torch.no_grad()
def reduce_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum those gradients over the ranks that hold the parameter, in place. A collective call.

    To be called after a step batch's last backward pass and its reduction over the data-parallel ranks, before the
    norm. Names are those of ``model.named_parameters()``, plain or sharded by FSDP2 since: of a ``DTensor`` the local
    parts are summed, which all ranks of ``group`` cut alike.
    """
    partial = partial_gradients(model)
    over: dict[Sharers, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name in partial and parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            over.setdefault(partial[name], []).append(local)
    for sharers, gradients in over.items():
        for some in _at_most(gradients, FLATTEN_BYTES):
            all_reduce_together(some, sharers or group)


def all_reduce_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each of ``tensors``, of one dtype and device, over ``group``, in place and by one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def _at_most(tensors: Iterable[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive runs of one dtype and device, of at most ``limit_bytes`` or one tensor; empty tensors left out."""
    run: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if run and (size + num_bytes > limit_bytes or (run[0].dtype, run[0].device) != (tensor.dtype, tensor.device)):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += num_bytes
    if run:
        yield run
