"""The part of a parameter that this rank holds, and filling a model with such parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class PartOf:
    """A block of a whole tensor: where it begins in every dim, and how long it is there."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def held(cls, tensor: torch.Tensor) -> PartOf:
        """The part of ``tensor`` that this rank holds: all of it, or a ``DTensor``'s shard (which may be empty)."""
        whole = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(whole, (0,) * len(whole), whole)
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shape, offsets = tuple(shape), tuple(offsets)
        if 0 in shape:  # the offset of nothing may lie outside
            shape, offsets = tuple(tensor.to_local().shape), (0,) * len(whole)
        return cls(whole, offsets, shape)

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
    """Replace every parameter by one of ``dtype``, in place; ties are kept, buffers stay as they are."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in cast:
                    cast[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = cast[parameter]


def fill_parameters(
    model: nn.Module, values: Callable[[str, PartOf], torch.Tensor], device: torch.device | str
) -> None:
    """Replace every parameter of a meta ``model`` by one that holds its part, one after the other; ties are kept.

    Args:
        values: the part of the parameter of that name; it is cast to the parameter's dtype.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    for name, parameter in list(model.named_parameters()):
        filled = _with_value(parameter, values(name, PartOf.held(parameter)), device)
        for module, attribute in holders.pop(parameter):
            module._parameters[attribute] = filled


def _with_value(parameter: nn.Parameter, part: torch.Tensor, device: torch.device | str) -> nn.Parameter:
    local = part.detach().to(device=device, dtype=parameter.dtype).contiguous()
    if part.untyped_storage().nbytes() > local.nbytes and local.untyped_storage() is part.untyped_storage():
        local = local.clone()  # a view would keep what it was cut from alive
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    return nn.Parameter(local, requires_grad=parameter.requires_grad)
