"""The parts of a parameter that this rank holds, and filling a model with such parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_pipe.models.layout import Fragment, Layout, fragments, layouts_of, unsharded_shape


@dataclass(frozen=True)
class PartOf:
    """A block of a whole tensor: where it begins in every dim, and how long it is there."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, int] | None:
        """The range in the first dim; None where that is all of it."""
        if not self.whole or self.shape[0] == self.whole[0]:
            return None
        return self.offsets[0], self.offsets[0] + self.shape[0]

    def rest_of(self, rows: torch.Tensor) -> torch.Tensor:
        """From the rows of :attr:`rows` the part itself, which may be cut in other dims too."""
        for dim in range(1, len(self.shape)):
            rows = rows.narrow(dim, self.offsets[dim], self.shape[dim])
        return rows


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``, as a live view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every parameter but bytes by one of ``dtype``, in place; ties are kept, buffers stay as they are."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in cast:
                    cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = cast[parameter]


def parts_held(tensor: torch.Tensor, layout: Layout | None) -> list[tuple[Fragment, PartOf]]:
    """The blocks of the unsharded parameter that this rank holds of ``tensor``, and where each lies locally."""
    global_shape = unsharded_shape(tensor, layout)
    return [(block, PartOf(global_shape, block.offsets, block.shape)) for block in fragments(tensor, layout)]


def fill_parameters(
    model: nn.Module, values: Callable[[str, PartOf], torch.Tensor], device: torch.device | str
) -> None:
    """Replace every parameter of a meta ``model`` by one that holds its part, one after the other; ties are kept.

    Args:
        values: a part of the parameter that the unsharded model calls by that name; it is cast to the parameter's
            dtype.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    layouts = layouts_of(model)
    for name, parameter in list(model.named_parameters()):
        layout = layouts.get(name)
        drawn = [
            (block, values(layout.name if layout else name, part)) for block, part in parts_held(parameter, layout)
        ]
        filled = _with_value(parameter, drawn, device)
        for module, attribute in holders.pop(parameter):
            module._parameters[attribute] = filled


def _with_value(
    parameter: nn.Parameter, drawn: list[tuple[Fragment, torch.Tensor]], device: torch.device | str
) -> nn.Parameter:
    """``parameter`` anew, its local tensor put together from the blocks ``drawn``."""
    shape = local_tensor(parameter).shape
    if len(drawn) == 1 and tuple(drawn[0][1].shape) == tuple(shape):
        part = drawn[0][1].detach()
        local = part.to(device=device, dtype=parameter.dtype).contiguous()
        if part.untyped_storage().nbytes() > local.nbytes and local.untyped_storage() is part.untyped_storage():
            local = local.clone()  # a view would keep what it was cut from alive
    else:
        local = torch.empty(shape, dtype=parameter.dtype, device=device)
        for block, part in drawn:
            block.of(local).copy_(part.detach())
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
