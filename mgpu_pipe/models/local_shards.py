"""Position of a rank's plain local parameter in the unsharded model.

Tensor, expert and pipeline parallelism replace a module's parameter by a smaller plain one. A :class:`Layout` gives its
rows (or columns) and parameter in the unsharded model. Filling, checkpoints, the gradient norm and verification read
it. FSDP2 may shard the local parameter further: :func:`fragments` combines both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_pipe.system.compat.torch_private import local_slice

LAYOUTS = "mgpu_layouts"
"""Attribute of a root module with its layouts by local parameter name."""


@dataclass(frozen=True)
class Layout:
    """Coordinates of a local parameter in the unsharded one.

    Attributes:
        name: name in the unsharded model's ``named_parameters()``; differs from the local name if a pipeline stage
            has its own copy of a tied weight.
        whole: unsharded shape.
        dim: cut dim.
        ranges: ``(start, stop)`` along ``dim``, in the order of the local parameter.
        owned: whether this rank's copy counts (in the norm, in a file) if several ranks have the same values.
    """

    name: str
    whole: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    owned: bool = True

    @classmethod
    def uncut(cls, name: str, whole: tuple[int, ...], owned: bool = True) -> Layout:
        """Layout of a whole parameter, which other ranks have too."""
        return cls(name, tuple(whole), 0, ((0, whole[0]),) if whole else (), owned)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local parameter."""
        if not self.whole:
            return ()
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.whole[: self.dim], length, *self.whole[self.dim + 1 :])


@dataclass(frozen=True)
class Fragment:
    """Block of a local tensor and its offsets in the unsharded one; both have ``shape``."""

    local: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block as a live view of the local ``tensor``."""
        for dim, (start, length) in enumerate(zip(self.local, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def layouts_of(model: nn.Module) -> Mapping[str, Layout]:
    """Layouts of ``model`` by local parameter name. A parameter without one is whole and owned."""
    return model.__dict__.get(LAYOUTS, {})


def add_layouts(model: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Records ``layouts`` on the root module ``model``.

    A parameter with an earlier layout (a pipeline stage's copy of a tied weight) keeps that name; it is owned if both
    layouts are.
    """
    merged = dict(layouts_of(model))
    for name, layout in layouts.items():
        earlier = merged.get(name)
        if earlier is not None:
            layout = replace(layout, name=earlier.name, owned=layout.owned and earlier.owned)
        merged[name] = layout
    model.__dict__[LAYOUTS] = merged


def unsharded_shape(tensor: torch.Tensor, layout: Layout | None) -> tuple[int, ...]:
    """Shape of the unsharded parameter that ``tensor`` is a part of."""
    return layout.whole if layout is not None else tuple(tensor.shape)


def fragments(tensor: torch.Tensor, layout: Layout | None) -> Iterator[Fragment]:
    """Blocks of ``tensor`` on this rank, a plain one or a ``DTensor`` of the local parameter."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offsets = local_slice(tensor)
    if 0 in shape:
        return
    if layout is None or not layout.whole:
        yield Fragment((0,) * len(shape), offsets, shape)
        return
    dim, begin = layout.dim, offsets[layout.dim]
    end, local_start = begin + shape[dim], 0
    for start, stop in layout.ranges:
        low, high = max(begin, local_start), min(end, local_start + stop - start)
        if low < high:
            yield Fragment(
                tuple(low - begin if d == dim else 0 for d in range(len(shape))),
                tuple(start + low - local_start if d == dim else offsets[d] for d in range(len(shape))),
                tuple(high - low if d == dim else shape[d] for d in range(len(shape))),
            )
        local_start += stop - start


@dataclass(frozen=True)
class TensorPart:
    """Block of a whole tensor: offset and length in every dim."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int] | None:
        """Range in the first dim; None if the part covers it."""
        if not self.whole or self.shape[0] == self.whole[0]:
            return None
        return self.offsets[0], self.offsets[0] + self.shape[0]

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """The part, cut in the other dims, of a tensor that has only :attr:`rows`."""
        for dim in range(1, len(self.shape)):
            rows = rows.narrow(dim, self.offsets[dim], self.shape[dim])
        return rows


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor`` as a live view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts every floating-point parameter to ``dtype``, in place; ties are kept, buffers unchanged."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in cast:
                    cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = cast[parameter]


def local_parts(tensor: torch.Tensor, layout: Layout | None) -> list[tuple[Fragment, TensorPart]]:
    """Local blocks of ``tensor`` on this rank, each with its part of the unsharded parameter."""
    global_shape = unsharded_shape(tensor, layout)
    return [(block, TensorPart(global_shape, block.offsets, block.shape)) for block in fragments(tensor, layout)]


def fill_parameters(
    model: nn.Module, values: Callable[[str, TensorPart], torch.Tensor], device: torch.device | str
) -> None:
    """Replaces a meta model's parameters by this rank's parts of ``values`` by name, in their types; ties stay."""
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    layouts = layouts_of(model)
    for name, parameter in list(model.named_parameters()):
        layout = layouts.get(name)
        blocks = [
            (block, values(layout.name if layout else name, part)) for block, part in local_parts(parameter, layout)
        ]
        filled = _with_value(parameter, blocks, device)
        for module, attribute in holders.pop(parameter):
            module._parameters[attribute] = filled


def _with_value(
    parameter: nn.Parameter, blocks: list[tuple[Fragment, torch.Tensor]], device: torch.device | str
) -> nn.Parameter:
    """New ``parameter`` with a local tensor assembled from ``blocks``."""
    shape = local_tensor(parameter).shape
    if len(blocks) == 1 and tuple(blocks[0][1].shape) == tuple(shape):
        part = blocks[0][1].detach()
        local = part.to(device=device, dtype=parameter.dtype).contiguous()
        if part.untyped_storage().nbytes() > local.nbytes and local.untyped_storage() is part.untyped_storage():
            local = local.clone()  # a view would keep the whole tensor alive
    else:
        local = torch.empty(shape, dtype=parameter.dtype, device=device)
        for block, part in blocks:
            block.view(local).copy_(part.detach())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != local.device.type:
        # Offloaded: from_local would move it to the mesh's device.
        offloaded = torch.empty_like(parameter, device=device)
        local_tensor(offloaded).copy_(local)
        local = offloaded
    elif isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
