"""Ranges of flattened tensors as tensor slices: ZeRO cuts parameters where its flat buffers happen to be cut.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mgpu_pipe.checkpoint.tensor_slices import TensorSlice


def flat_slices(name: str, shape: Sequence[int], start: int, stop: int) -> list[TensorSlice]:
    """Tensor slices that hold, in order, the elements ``start`` to ``stop`` of the flattened (row-major) tensor.

    Each tensor slice is contiguous in the flattened tensor, so the elements of a tensor slice are a slice of the range.
    There are at most ``2 * len(shape) - 1`` of them: partial blocks before and after a run of whole ones, in every dim
    but the last; none where the range is empty.

    Raises:
        ValueError: the range leaves the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {list(shape)}")
    if start == stop:
        return []
    return [TensorSlice(name, offsets, sizes) for offsets, sizes in _cut(tuple(shape), start, stop)]


_Block = tuple[tuple[int, ...], tuple[int, ...]]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[_Block]:
    """Offsets and shapes of the blocks of a non-empty range."""
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows [first, last) are whole
    if first > last:  # inside one row
        return _within(last, shape, start, stop, inner)
    blocks: list[_Block] = []
    if start < first * inner:
        blocks += _within(first - 1, shape, start, first * inner, inner)
    if last > first:
        rest = shape[1:]
        blocks.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if stop > last * inner:
        blocks += _within(last, shape, last * inner, stop, inner)
    return blocks


def _within(row: int, shape: tuple[int, ...], start: int, stop: int, inner: int) -> list[_Block]:
    """The blocks of a range that lies in one row."""
    return [
        ((row, *offsets), (1, *sizes)) for offsets, sizes in _cut(shape[1:], start - row * inner, stop - row * inner)
    ]
