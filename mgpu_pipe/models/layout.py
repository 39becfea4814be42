"""Where a rank's plain local parameter lies in the unsharded model.

Tensor, expert and pipeline parallelism replace a module's parameter by a smaller plain one. A :class:`Layout` says
which rows (or columns) of which parameter of the unsharded model it holds; filling, checkpoints, the gradient norm and
verification read it. FSDP2 may shard the local parameter further: :func:`fragments` puts both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_pipe.compat.torch_private import local_slice

LAYOUTS = "mgpu_layouts"
"""The attribute of a model's root module that holds its layouts by local parameter name."""


@dataclass(frozen=True)
class Layout:
    """A local parameter in the coordinates of the unsharded one.

    Attributes:
        name: of the unsharded model's ``named_parameters()``; another than the local name where a pipeline stage holds
            its own copy of a tied weight.
        whole: the unsharded shape.
        dim: the dim that is cut.
        ranges: ``(start, stop)`` along ``dim``, in the order in which the local parameter holds them.
        owned: whether this rank's copy counts, where several hold the same values (in the norm, in a file).
    """

    name: str
    whole: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    owned: bool = True

    @classmethod
    def uncut(cls, name: str, whole: tuple[int, ...], owned: bool = True) -> Layout:
        """The whole parameter, which other ranks hold too."""
        return cls(name, tuple(whole), 0, ((0, whole[0]),) if whole else (), owned)

    @property
    def shape(self) -> tuple[int, ...]:
        """The local parameter's."""
        if not self.whole:
            return ()
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.whole[: self.dim], length, *self.whole[self.dim + 1 :])


@dataclass(frozen=True)
class Fragment:
    """A block of a local tensor and where it lies in the unsharded one; both have ``shape``."""

    local: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block as a live view of the local ``tensor``."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def layouts_of(model: nn.Module) -> Mapping[str, Layout]:
    """The layouts of ``model`` by local parameter name; a parameter without one is whole, and its rank's own."""
    return model.__dict__.get(LAYOUTS, {})


def add_layouts(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Record ``layouts`` on the root module ``model``.

    An axis that cuts a parameter of which an earlier one took a copy (a pipeline stage's of a tied weight) keeps that
    copy's name; it is owned where both say so.
    """
    merged = dict(layouts_of(model))
    for name, layout in layouts.items():
        earlier = merged.get(name)
        if earlier is not None:
            layout = replace(layout, name=earlier.name, owned=layout.owned and earlier.owned)
        merged[name] = layout
    model.__dict__[LAYOUTS] = merged


def unsharded_shape(tensor: torch.Tensor, layout: Layout | None) -> tuple[int, ...]:
    """The shape of the parameter of the unsharded model that ``tensor`` is a part of."""
    return layout.whole if layout is not None else tuple(tensor.shape)


def fragments(tensor: torch.Tensor, layout: Layout | None) -> Iterator[Fragment]:
    """What this rank holds of ``tensor`` (a plain one, or a ``DTensor`` of the local parameter), block by block."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offsets = local_slice(tensor)
    if 0 in shape:
        return
    if layout is None or not layout.whole:
        yield Fragment((0,) * len(shape), offsets, shape)
        return
    dim, begin = layout.dim, offsets[layout.dim]
    end, at = begin + shape[dim], 0
    for start, stop in layout.ranges:
        low, high = max(begin, at), min(end, at + stop - start)
        if low < high:
            yield Fragment(
                tuple(low - begin if d == dim else 0 for d in range(len(shape))),
                tuple(start + low - at if d == dim else offsets[d] for d in range(len(shape))),
                tuple(high - low if d == dim else shape[d] for d in range(len(shape))),
            )
        at += stop - start
