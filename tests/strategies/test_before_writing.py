"""Before anything that a save may still be reading is written, the strategy says so. Oracle: the values themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.topology import ParallelDims
from tests.support.processes import run_processes
from tests.support.training import Case, step_batch_of, trained

WAYS: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "ddp": (ParallelDims(dp_replicate=2), {}),
    "fsdp": (ParallelDims(dp_shard=2), {}),
    "zero1": (ParallelDims(dp_shard=2), {"zero_stage": 1}),
    "zero3": (ParallelDims(dp_shard=2), {"zero_stage": 3}),
}
LIKE_ANOTHER = ("ddp", "zero1")


def watched(case: Case, dims: ParallelDims) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """The weights whenever it is said that they will be written, and when they were written."""
    said: list[dict[str, torch.Tensor]] = []
    written: list[dict[str, torch.Tensor]] = []

    def weights(strategy: Any) -> dict[str, torch.Tensor]:
        return {shard.tensor_slice.key: shard.tensor.clone() for shard in strategy.model_shards()}

    def begin(strategy: Any) -> None:
        strategy.average.decay, strategy.average.evaluated = 0.8, True
        written.append(weights(strategy))
        strategy.before_writing = lambda: said.append(weights(strategy))

    def evaluate(strategy: Any) -> None:
        written.append(weights(strategy))
        batch = step_batch_of(case, 0, dims.data_parallel_rank(dist.get_rank()), dims.data_parallel_size)
        with strategy.evaluated_weights():
            strategy.run_evaluation(batch)

    trained(case, dims, on_start=begin, on_end=evaluate)
    return said, written


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in LIKE_ANOTHER else n for n in WAYS]
)
def test_it_is_said_before_every_update_and_before_the_average_takes_the_weights_place(name: str) -> None:
    dims, options = WAYS[name]
    case = Case("llama", steps=3, **options)
    for said, (first, last) in run_processes(dims.world_size, watched, case, dims):
        assert len(said) == 3 + 1
        for name, value in first.items():
            states = [value, *(one[name] for one in said)]
            assert torch.equal(states[0], states[1])
            assert not any(torch.equal(before, after) for before, after in pairwise(states[1:]))
            assert torch.equal(states[-1], last[name])
