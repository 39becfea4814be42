"""The collectives of tensor and sequence parallelism, as functions that autograd knows.

Each forward collective has its conjugate in the backward pass (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053,
section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation", arXiv:2205.05198, section 4.2.2). All traffic
goes through the plain functions at the top, which take and give contiguous tensors and leave their input alone: a
result that activation checkpointing keeps must not change afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_pipe.system.compat.torch_private import group_of_name

# torch 2.13 renamed them, and warns of the old names that 2.10 has alone.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

SEQUENCE_DIM = -2
"""Activations are ``(..., sequence, width)``."""
GATHER_BYTES = 64 << 10
"""Without gradients, sums of at most so many bytes are gathered: gloo's all-reduce takes twice the rounds."""


def all_reduce_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``x`` over the ranks of ``group``."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole ``(..., sequence, width)`` from every rank's ``(..., sequence / size, width)``."""
    parts = x.new_empty((group.size(), *x.shape))
    _all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.movedim(0, SEQUENCE_DIM - 1).flatten(SEQUENCE_DIM - 1, SEQUENCE_DIM)


@torch.library.custom_op("mgpu_pipe::gather_again", mutates_args=())
def gather_again(x: torch.Tensor, group: str) -> torch.Tensor:
    """Gathers like :func:`all_gather_sequence`, in the backward pass of compiled code.

    A separate operator, so that the compiler does not keep the forward pass's result for it. Calls with the same ``x``
    become one.

    Args:
        group: name of the group.
    """
    return all_gather_sequence(x, group_of_name(group)).contiguous()


@gather_again.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    *outer, length, width = x.shape
    return x.new_empty(*outer, length * group_of_name(group).size(), width)


def reduce_scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, along the sequence, of the sum of ``x`` over the ranks."""
    parts = x.unflatten(SEQUENCE_DIM, (group.size(), -1)).movedim(SEQUENCE_DIM - 1, 0).contiguous()
    mine = torch.empty_like(parts[0])
    _reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def slice_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of ``x`` along the sequence; no communication."""
    length = x.shape[SEQUENCE_DIM] // group.size()
    return x.narrow(SEQUENCE_DIM, group.rank() * length, length).contiguous()


def all_gather_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``x``, stacked: ``(size, *x.shape)``."""
    parts = x.new_empty((group.size(), *x.shape))
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts


def reduce_scatter_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of ``x`` over the ranks."""
    mine = x.new_empty((len(x) // group.size(), *x.shape[1:]))
    _reduce_scatter(mine, x.contiguous(), group=group)
    return mine


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


class _DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: int) -> torch.Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.divisor, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, partial_gradient: bool) -> torch.Tensor:
        ctx.group, ctx.partial_gradient = group, partial_gradient
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        take = reduce_scatter_sequence if ctx.partial_gradient else slice_sequence
        return take(grad, ctx.group), None, None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, partial: bool) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_sequence(x, group) if partial else slice_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_sequence(grad, ctx.group), None, None


def sum_forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum of the ranks' partial results; the gradient, which is whole on every rank, passes as it is."""
    if torch.is_grad_enabled():
        return _SumForward.apply(x, group)
    if x.device.type == "cpu" and x.nbytes <= GATHER_BYTES:
        return all_gather_parts(x, group).sum(0)
    return all_reduce_sum(x, group)


def sum_backward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x`` itself, which every rank holds; its gradient is the sum of the ranks' partial ones."""
    return _SumBackward.apply(x, group) if torch.is_grad_enabled() else x


def divide_backward(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """``x`` itself; its gradient is divided, so that summing it over ranks that hold all of it counts it once."""
    return _DivideBackward.apply(x, divisor)


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup, partial_gradient: bool) -> torch.Tensor:
    """The whole sequence from the ranks' parts.

    Args:
        partial_gradient: what follows runs on a part of the weights, so that the ranks' gradients are to be summed
            (reduce-scatter); else it is the same computation on every rank, and each keeps its part of the gradient.
    """
    return _GatherSequence.apply(x, group, partial_gradient)


def split_sequence(x: torch.Tensor, group: dist.ProcessGroup, partial: bool) -> torch.Tensor:
    """This rank's part of the sequence, of the sum of ``x`` over the ranks if ``partial``, else of ``x``."""
    return _SplitSequence.apply(x, group, partial)


PARTIAL = "mgpu_partial_gradients"
"""The attribute of a root module that holds, by parameter name, the ranks to sum over; None is the whole axis."""
FLATTEN_BYTES = 64 << 20
"""Limit of the bytes that one collective sums, unless one gradient is larger."""

Sharers = dist.ProcessGroup | None


def add_partial_gradients(model: nn.Module, partial: Mapping[str, Sharers]) -> None:
    """Record parameters of the root module ``model`` whose gradients are parts of a sum."""
    model.__dict__[PARTIAL] = {**partial_gradients(model), **partial}


def partial_gradients(model: nn.Module) -> Mapping[str, Sharers]:
    """The parameters recorded by :func:`add_partial_gradients`, with the ranks to sum over."""
    return model.__dict__.get(PARTIAL, {})


@torch.no_grad()
def reduce_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum partial gradients over the ranks that hold the parameter, in place. A collective call.

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
