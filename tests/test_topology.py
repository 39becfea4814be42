"""Oracles: arithmetic, and brute force over all ranks."""

from itertools import product
from typing import Any

import pytest

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.topology import AXES, BatchPlan, ParallelDims


def test_auto_takes_what_remains_of_the_world() -> None:
    dims = ParallelDims.resolve(StrategyConfig(name="x", dp_replicate="auto", tp=2), 8)
    assert (dims.dp_replicate, dims.tp, dims.world_size) == (4, 2, 8)
    assert dims.describe() == "dp_replicate=4 x tp=2"


@pytest.mark.parametrize(
    ("strategy", "world", "words"),
    [
        (StrategyConfig(dp_replicate=3), 4, ["trainer.devices=4", "use 3 processes"]),
        (StrategyConfig(dp_replicate="auto", tp=3), 4, ["trainer.devices=4", "multiple of 3"]),
        (StrategyConfig(dp_replicate="auto", dp_shard="auto"), 4, ["strategy.dp_shard=auto", "give a number"]),
        (StrategyConfig(tp=0), 1, ["strategy.tp=0", "at least 1"]),
        (StrategyConfig(dp_shard=4, tp=2, ep=3), 8, ["strategy.ep=3", "[2, 4, 8]"]),
        (StrategyConfig(dp_shard=4, tp=2, ep=1), 8, []),
    ],
)
def test_impossible_sizes_are_refused_with_the_fix(strategy: StrategyConfig, world: int, words: list[str]) -> None:
    if not words:
        assert ParallelDims.resolve(strategy, world).ep == 1
        return
    with pytest.raises(ConfigError) as refused:
        ParallelDims.resolve(strategy, world)
    assert all(word in str(refused.value) for word in words), refused.value


def test_coordinates_run_like_the_nested_loops_of_the_mesh() -> None:
    dims = ParallelDims(pp=2, dp_replicate=2, dp_shard=3, cp=1, tp=2)
    loops = product(*(range(getattr(dims, axis)) for axis in AXES))
    for rank, at in enumerate(loops):
        assert tuple(dims.coordinates(rank).values()) == at
        assert dims.data_parallel_rank(rank) == at[1] * 3 + at[2]


@pytest.mark.parametrize(
    ("total", "world", "micro", "expected"),
    [
        (32, 4, "auto", (8, 1)),
        (32, 1, "auto", (8, 4)),
        (30, 2, "auto", (5, 3)),
        (32, 2, 2, (2, 8)),
        (7, 1, "auto", (7, 1)),
    ],
)
def test_micro_batches_are_derived(total: int, world: int, micro: Any, expected: tuple[int, int]) -> None:
    plan = BatchPlan.resolve(DataConfig(global_batch_size=total, micro_batch_size=micro), world)
    assert (plan.micro_batch_size, plan.num_micro_batches) == expected
    assert plan.micro_batch_size * plan.num_micro_batches * world == total


@pytest.mark.parametrize(
    ("total", "world", "micro", "words"),
    [
        (10, 4, "auto", ["data.global_batch_size=10", "use 8 or 12"]),
        (3, 4, "auto", ["data.global_batch_size=3", "use 4"]),
        (0, 1, "auto", ["data.global_batch_size=0"]),
        (24, 2, 5, ["data.micro_batch_size=5", "use 4 or 6"]),
        (24, 2, 0, ["data.micro_batch_size=0"]),
    ],
)
def test_batches_that_do_not_divide_name_the_nearest_that_do(total: int, world: int, micro: int, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BatchPlan.resolve(DataConfig(global_batch_size=total, micro_batch_size=micro), world)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("share", "stages", "micro"), [(32, 1, 8), (32, 2, 8), (16, 2, 4), (8, 4, 1), (6, 4, 6), (7, 1, 7)]
)
def test_auto_leaves_every_stage_two_micro_batches_where_it_can(share: int, stages: int, micro: int) -> None:
    plan = BatchPlan.resolve(DataConfig(global_batch_size=share), 1, stages)
    assert plan.micro_batch_size == micro
