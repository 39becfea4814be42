"""The global gradient norm and clipping, over every mesh at once, by one function that every engine uses.

Squares are summed and reduced in float64: float32 ``vector_norm`` is off by 1e-5 to 2e-4 by itself, and shards are
off differently, so that the clip factor would depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from mgpu_pipe.compat.torch_private import foreach_multiply, foreach_norm

# torch.nn.utils.clip_grad_norm_ uses the same guard against a zero norm.
CLIP_EPSILON = 1e-6


def squared_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of plain ``tensors`` of one device, as a float64 scalar."""
    return torch.stack(foreach_norm(tensors)).square_().sum()


def gradient_norm(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients of the whole model, as a float64 scalar on ``device``, equal on every rank.

    A ``DTensor`` gradient counts once for every element of the unsharded tensor: squares are summed over the mesh
    axes on which it is sharded and not over those on which it is replicated. A plain gradient is taken to be whole
    and equal on all ranks. A collective call where any gradient is sharded.
    """
    plain: list[torch.Tensor] = []
    sharded: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            axes = tuple(i for i, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
            sharded.setdefault((gradient.device_mesh, axes), []).append(gradient.to_local())
        else:
            plain.append(gradient)
    total = squared_norm(plain).to(device) if plain else torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, axes), tensors in sharded.items():
        partial = squared_norm(tensors).to(device)
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(partial, group=mesh.get_group(axis))
        total = total + partial
    return total.sqrt()


def counted_norm(
    parameters: Sequence[torch.nn.Parameter], counted: Sequence[bool], device: torch.device
) -> torch.Tensor:
    """:func:`gradient_norm` of a model that is cut over several meshes. A collective call of all ranks.

    Args:
        counted: for each parameter whether this rank's part of its gradient is to be counted, so that every element of
            the unsharded model is counted on one rank.
    """
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for p, counts in zip(parameters, counted, strict=True)
        if counts and p.grad is not None
    ]
    total = squared_norm(local).to(device) if local else torch.zeros((), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that a global norm of ``norm`` becomes at most ``max_norm``."""
    factor = max_norm / (norm + CLIP_EPSILON)
    if factor < 1.0:
        scale_gradients(parameters, factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply all gradients by ``factor``, in place."""
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if local:
        foreach_multiply(local, factor)
