"""Tiling against counting elements, flat ranges against numpy's flattening, the plan against each rank's slices."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest

from mgpu_pipe.checkpoint.save_plan import ShardRecord, plan_files
from mgpu_pipe.checkpoint.tensor_slices import TensorSlice, flat_slices, tiling_fault
from mgpu_pipe.errors import CheckpointSaveError
from tests.checkpoint.support import CUTS

SHAPES = {"a": (40, 12), "b": (96, 8), "c": (7,), "d": (), "e": (3, 5, 11), "z": (0, 4)}


def _random_slice(rng: random.Random, shape: tuple[int, ...]) -> TensorSlice:
    low = [rng.randrange(n) for n in shape]
    return TensorSlice("t", tuple(low), tuple(rng.randint(1, n - lo) for lo, n in zip(low, shape, strict=True)))


def test_tiling_agrees_with_counting_every_element() -> None:
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        cut = rng.choice(sorted(CUTS))
        world_size = rng.randint(1, 4)
        tensor_slices = {
            tensor_slice
            for rank in range(world_size)
            for tensor_slice in CUTS[cut]("t", shape, rank, world_size)
            if tensor_slice.volume
        }
        if rng.random() < 0.5:
            tensor_slices.discard(rng.choice(sorted(tensor_slices)))
            tensor_slices.add(_random_slice(rng, shape))
        count = np.zeros(shape, dtype=int)
        for tensor_slice in tensor_slices:
            count[tuple(slice(o, o + n) for o, n in zip(tensor_slice.offsets, tensor_slice.shape, strict=True))] += 1
        tiles = bool((count == 1).all())
        seen[tiles] += 1
        assert (tiling_fault(shape, list(tensor_slices)) is None) == tiles, (shape, tensor_slices)
    assert min(seen.values()) > 50


@pytest.mark.parametrize(
    ("tensor_slice", "words"),
    [
        (TensorSlice("t", (0, 2), (2, 3)), "leaves the tensor"),
        (TensorSlice("t", (-1, 0), (2, 4)), "leaves the tensor"),
        (TensorSlice("t", (0,), (2,)), "dimensions"),
    ],
)
def test_a_box_outside_its_tensor_is_no_tile(tensor_slice: TensorSlice, words: str) -> None:
    assert words in str(tiling_fault((2, 4), [tensor_slice]))


def _held(cut: str, world_size: int) -> list[list[ShardRecord]]:
    return [
        [
            ShardRecord(kind, tensor_slice, shape, "F32")
            for kind in ("model", "optimizer")
            for name, shape in SHAPES.items()
            for tensor_slice in CUTS[cut](name, shape, rank, world_size)
        ]
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_element_is_written_by_exactly_one_rank_that_holds_it(cut: str, world_size: int) -> None:
    held = _held(cut, world_size)
    plan = plan_files(held)
    for kind, tensors in plan.items():
        assert tensors.keys() == SHAPES.keys()
        for name, tensor in tensors.items():
            count = np.zeros(SHAPES[name], dtype=int)
            for tensor_slice, file in tensor.tensor_slices:
                rank = int(file.removeprefix(f"{kind}-").removesuffix(".safetensors"))
                assert tensor_slice in [item.tensor_slice for item in held[rank]]
                count[
                    tuple(slice(o, o + n) for o, n in zip(tensor_slice.offsets, tensor_slice.shape, strict=True))
                ] += 1
            assert (count == 1).all()


def test_replicated_tensors_are_dealt_evenly_by_bytes() -> None:
    held = [
        [ShardRecord("model", TensorSlice.whole(f"w{i}", (100 + i,)), (100 + i,), "F32") for i in range(40)]
        for _ in range(4)
    ]
    load = dict.fromkeys(range(4), 0)
    for tensor in plan_files(held)["model"].values():
        for tensor_slice, file in tensor.tensor_slices:
            load[int(file[6:11])] += tensor_slice.volume
    assert max(load.values()) - min(load.values()) < 140


def test_ranks_may_list_their_pieces_in_any_order() -> None:
    held = _held("fused", 3)
    assert plan_files(held) == plan_files([list(reversed(items)) for items in held])


def test_shared_tensors_are_dealt_around_what_one_rank_alone_holds() -> None:
    alone = ShardRecord("model", TensorSlice.whole("alone", (900,)), (900,), "F32")
    shared = ShardRecord("model", TensorSlice.whole("shared", (1000,)), (1000,), "F32")
    plan = plan_files([[shared, alone], [shared]])["model"]
    assert plan["shared"].tensor_slices[0][1] == "model-00001.safetensors"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[ShardRecord("model", TensorSlice("t", (0,), (3,)), (8,), "F32")], []], "hold 3 of the 8 elements"),
        (
            [
                [ShardRecord("model", TensorSlice("t", (0,), (5,)), (8,), "F32")],
                [ShardRecord("model", TensorSlice("t", (3,), (5,)), (8,), "F32")],
            ],
            "overlap",
        ),
        (
            [
                [ShardRecord("model", TensorSlice("t", (0,), (4,)), (8,), "F32")],
                [ShardRecord("model", TensorSlice("t", (4,), (4,)), (8,), "BF16")],
            ],
            "rank 1 has BF16",
        ),
        (
            [
                [ShardRecord("model", TensorSlice("t", (0,), (4,)), (8,), "F32")],
                [ShardRecord("model", TensorSlice("t", (4,), (4,)), (9,), "F32")],
            ],
            r"rank 1 has F32 \[9\]",
        ),
        ([[ShardRecord("model", TensorSlice("t", (0,), (8,)), (8,), "F32")] * 2], "twice"),
        ([[ShardRecord("optimizer", TensorSlice("t", (0,), (0,)), (8,), "F32")]], "0 slices"),
    ],
)
def test_slices_that_do_not_make_up_the_tensor_are_refused(ranks: list[list[ShardRecord]], words: str) -> None:
    with pytest.raises(CheckpointSaveError, match=words):
        plan_files(ranks)


RANGED = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def _elements(shape: tuple[int, ...], start: int, stop: int) -> list[int]:
    """The flat indices that the tensor slices hold, in the order in which they are written."""
    whole = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    for tensor_slice in flat_slices("w", shape, start, stop):
        part = whole[tuple(slice(o, o + n) for o, n in zip(tensor_slice.offsets, tensor_slice.shape, strict=True))]
        assert part.shape == tensor_slice.shape
        found += part.reshape(-1).tolist()
    return found


@pytest.mark.parametrize("shape", RANGED)
def test_every_range_is_held_in_order_by_few_slices(shape: tuple[int, ...]) -> None:
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        assert _elements(shape, start, stop) == list(range(start, stop))
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
