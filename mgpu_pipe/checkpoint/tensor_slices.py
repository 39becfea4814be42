"""Tensor slices: a rank's parts of a tensor in the coordinates of the unsharded module.

They describe the sharding of every engine. A :class:`LocalShard` is a tensor slice with its live tensor.
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
        """The block that both tensor slices cover; None without overlap."""
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
    """A tensor slice with the shape of its unsharded tensor and its live tensor, of the slice's shape.

    Saving reads ``tensor``; loading writes into it in place.
    """

    tensor_slice: TensorSlice
    global_shape: tuple[int, ...]
    tensor: torch.Tensor


def tiling_fault(global_shape: Sequence[int], tensor_slices: Sequence[TensorSlice]) -> str | None:
    """Reason why slices do not cover a tensor exactly once, or None: no overlap, and its volume together."""
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
    """Too many tensor slices remain that no straight cut separates."""


MOST_ENTANGLED = 512
"""Most tensor slices that are compared in pairs. Straight cuts along one dim after another separate the slices of every
strategy.
"""
MOST_VISITS = 64
"""Most visits of a tensor slice, which bounds nested cuts."""


def _first_overlap(tensor_slices: list[TensorSlice], dims: Sequence[int]) -> tuple[TensorSlice, TensorSlice] | None:
    """Two slices that overlap, or None. Straight cuts make small groups; :class:`_TooEntangled` where they do not."""
    pending = [tensor_slices]
    visits = MOST_VISITS * len(tensor_slices) + MOST_ENTANGLED
    while pending:
        group = pending.pop()
        visits -= len(group)
        parts = next((parts for dim in dims if len(parts := _separate(group, dim)) > 1), None)
        if parts is not None:
            pending += [part for part in parts if len(part) > 1]
            if visits < 0:
                raise _TooEntangled
        elif len(group) > MOST_ENTANGLED:
            raise _TooEntangled
        else:
            visits -= len(group) ** 2 // MOST_ENTANGLED
            for index, tensor_slice in enumerate(group):
                for other in group[:index]:
                    if not dims or other.intersection(tensor_slice):
                        return other, tensor_slice
    return None


def _separate(tensor_slices: list[TensorSlice], dim: int) -> list[list[TensorSlice]]:
    """The tensor slices in groups that straight cuts across ``dim`` separate."""
    groups: list[list[TensorSlice]] = []
    end = -1
    for tensor_slice in sorted(tensor_slices, key=lambda item: (item.offsets[dim], item.shape[dim])):
        if tensor_slice.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(tensor_slice)
        end = max(end, tensor_slice.offsets[dim] + tensor_slice.shape[dim])
    return groups


def flat_slices(name: str, shape: Sequence[int], start: int, stop: int) -> list[TensorSlice]:
    """Tensor slices with the elements ``start`` to ``stop`` of the flattened (row-major) tensor, in order.

    Each tensor slice is contiguous in the flattened tensor, so its elements are a slice of the range. There are at most
    ``2 * len(shape) - 1``: partial blocks before and after a run of whole ones, in every dim but the last. An empty
    range has none.

    Raises:
        ValueError: the range leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {list(shape)}")
    if start == stop:
        return []
    return [TensorSlice(name, offsets, sizes) for offsets, sizes in _split_range(tuple(shape), start, stop)]


_Block = tuple[tuple[int, ...], tuple[int, ...]]


def _split_range(shape: tuple[int, ...], start: int, stop: int) -> list[_Block]:
    """Offsets and shapes of the blocks of a non-empty range."""
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows [first, last) are whole
    if first > last:  # inside one row
        return _split_row(last, shape, start, stop, inner)
    blocks: list[_Block] = []
    if start < first * inner:
        blocks += _split_row(first - 1, shape, start, first * inner, inner)
    if last > first:
        rest = shape[1:]
        blocks.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if stop > last * inner:
        blocks += _split_row(last, shape, last * inner, stop, inner)
    return blocks


def _split_row(row: int, shape: tuple[int, ...], start: int, stop: int, inner: int) -> list[_Block]:
    """The blocks of a range inside one row."""
    return [
        ((row, *offsets), (1, *sizes))
        for offsets, sizes in _split_range(shape[1:], start - row * inner, stop - row * inner)
    ]
