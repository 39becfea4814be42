"""Oracle: numpy's own flattening; every range of small tensors, and random ranges of larger ones."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest

from mgpu_pipe.checkpoint.tensor_slices import flat_slices, tiling_fault

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def elements(shape: tuple[int, ...], start: int, stop: int) -> list[int]:
    """The flat indices that the tensor slices hold, in the order in which they are written."""
    whole = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for tensor_slice in flat_slices("w", shape, start, stop):
        part = whole[tuple(slice(o, o + n) for o, n in zip(tensor_slice.offsets, tensor_slice.shape, strict=True))]
        assert part.shape == tensor_slice.shape
        found += part.reshape(-1).tolist()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_held_in_order_by_few_slices(shape: tuple[int, ...]) -> None:
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        assert elements(shape, start, stop) == list(range(start, stop))
        assert len(flat_slices("w", shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_the_bound_is_reached() -> None:
    assert len(flat_slices("w", (4, 4, 4), 1, 63)) == 5


def test_equal_cuts_tile_a_large_tensor() -> None:
    draw = random.Random(3)
    for _ in range(50):
        shape = tuple(draw.randint(1, 40) for _ in range(draw.randint(1, 4)))
        ranks, size = draw.randint(1, 9), prod(shape)
        chunk = -(-size // ranks)
        tensor_slices = [
            tensor_slice
            for rank in range(ranks)
            for tensor_slice in flat_slices("w", shape, min(rank * chunk, size), min((rank + 1) * chunk, size))
        ]
        assert tiling_fault(shape, tensor_slices) is None


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="are not in a tensor"):
        flat_slices("w", (3, 4), start, stop)
