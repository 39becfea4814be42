"""Tensor slices: a rank's part of a tensor in the coordinates of the unsharded module.

Every engine's sharding is tensor slices. A :class:`LocalShard` is a tensor slice with the live tensor that fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, order=True)
class TensorSlice:
    """An axis-aligned block of the unsharded tensor ``name``; a scalar has empty ``offsets`` and ``shape``."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The entry's name in a file: ``name@o0,o1``; ``name@`` for a scalar."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> TensorSlice:
        return cls(name, (0,) * len(shape), tuple(shape))

    def intersection(self, other: TensorSlice) -> TensorSlice | None:
        """The block both tensor slices cover, or None."""
        if self.name != other.name or len(self.shape) != len(other.shape):
            return None
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return TensorSlice(self.name, low, tuple(h - lo for lo, h in zip(low, high, strict=True)))


@dataclass
class LocalShard:
    """A tensor slice, the shape of the whole tensor it belongs to, and the live tensor (of the tensor slice's shape)
    that fills it.

    Saving reads ``tensor``; loading writes into it in place.
    """

    tensor_slice: TensorSlice
    global_shape: tuple[int, ...]
    tensor: torch.Tensor


def tiling_fault(global_shape: Sequence[int], tensor_slices: Sequence[TensorSlice]) -> str | None:
    """Why ``tensor_slices`` do not cover every element of a tensor exactly once; None if they do.

    Tensor slices that lie inside, do not overlap and have the tensor's volume together leave no gap.
    """
    for tensor_slice in tensor_slices:
        if len(tensor_slice.offsets) != len(global_shape) or len(tensor_slice.shape) != len(global_shape):
            return f"{tensor_slice.key} does not have the {len(global_shape)} dimensions of the tensor"
        for offset, size, limit in zip(tensor_slice.offsets, tensor_slice.shape, global_shape, strict=True):
            if offset < 0 or size < 0 or offset + size > limit:
                described = f"{tensor_slice.key} of shape {list(tensor_slice.shape)}"
                return f"{described} leaves the tensor of shape {list(global_shape)}"
    if 0 not in global_shape and not all(tensor_slice.volume for tensor_slice in tensor_slices):
        return f"one of its {len(tensor_slices)} slices holds nothing"
    try:
        overlap = None if 0 in global_shape else _first_overlap(list(tensor_slices), range(len(global_shape)))
    except _TooEntangled:
        return f"its {len(tensor_slices)} slices are cut in no way that a strategy cuts"
    if overlap:
        return f"{overlap[0].key} and {overlap[1].key} overlap"
    covered, volume = sum(tensor_slice.volume for tensor_slice in tensor_slices), prod(global_shape)
    if covered != volume or not tensor_slices:
        return f"{len(tensor_slices)} slices hold {covered} of the {volume} elements"
    return None


class _TooEntangled(Exception):
    """Many tensor slices that no straight cut separates."""


MOST_ENTANGLED = 512
"""Tensor slices that are compared pair by pair. What strategies cut falls apart by straight cuts, one dim after
another.
"""
MOST_LOOKS = 64
"""Times that a tensor slice may be looked at: cuts that lie in one another."""


def _first_overlap(tensor_slices: list[TensorSlice], dims: Sequence[int]) -> tuple[TensorSlice, TensorSlice] | None:
    """Two tensor slices that overlap; None if none do. Straight cuts part the tensor slices until few are left
    together.

    Raises:
        _TooEntangled: more are left together than are compared, or parting them takes too many cuts.
    """
    left = [tensor_slices]
    looks = MOST_LOOKS * len(tensor_slices) + MOST_ENTANGLED
    while left:
        together = left.pop()
        looks -= len(together)
        parts = next((parts for dim in dims if len(parts := _parted(together, dim)) > 1), None)
        if parts is not None:
            left += [part for part in parts if len(part) > 1]
            if looks < 0:
                raise _TooEntangled
        elif len(together) > MOST_ENTANGLED:
            raise _TooEntangled
        else:
            looks -= len(together) ** 2 // MOST_ENTANGLED
            for index, tensor_slice in enumerate(together):
                for other in together[:index]:
                    if not dims or other.intersection(tensor_slice):
                        return other, tensor_slice
    return None


def _parted(tensor_slices: list[TensorSlice], dim: int) -> list[list[TensorSlice]]:
    """The tensor slices in groups that a straight cut across ``dim`` separates."""
    groups: list[list[TensorSlice]] = []
    end = -1
    for tensor_slice in sorted(tensor_slices, key=lambda one: (one.offsets[dim], one.shape[dim])):
        if tensor_slice.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(tensor_slice)
        end = max(end, tensor_slice.offsets[dim] + tensor_slice.shape[dim])
    return groups
