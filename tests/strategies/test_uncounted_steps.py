"""A step without a trained token leaves weights and optimizer state as they are, bit for bit, under every engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.topology import ParallelDims
from tests.support import ways
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, trained

WAYS: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    **ways.WAYS,
    "fp16": (ParallelDims(), {"precision": "fp16"}),
    "muon": (
        ParallelDims(dp_shard=2),
        {"optimizer": "mgpu_pipe.optim.muon.Muon", "optimizer_options": {"weight_decay": 0.1, "adamw_lr": 3e-4}},
    ),
}
SAMPLED = ("pp 2", "zero3 2")


def averaged(case: Case, dims: ParallelDims, first_step: int = 0) -> Outcome:
    """Trains with an average of the weights, which is optimizer state too."""

    def watch(strategy: Any) -> None:
        strategy.average.decay = 0.5

    return trained(case, dims, first_step, on_start=watch)


def compare(shards: list[LocalShard], expected: list[LocalShard], where: str) -> None:
    assert [shard.tensor_slice for shard in shards] == [shard.tensor_slice for shard in expected]
    for shard, other in zip(shards, expected, strict=True):
        assert torch.equal(shard.tensor, other.tensor), f"{where}: {shard.tensor_slice.key}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.exhaustive) for name in WAYS]
)
def test_a_step_without_labels_changes_nothing(way: str) -> None:
    dims, more = WAYS[way]
    expected = run_processes(dims.world_size, averaged, Case(steps=1, layers=2, **more), dims, 1)
    for first_step, uncounted in ((0, 0), (1, 2)):  # before the step that counts, and after it
        case = Case(steps=2, layers=2, uncounted=(uncounted,), **more)
        silent = uncounted - first_step
        for result, single in zip(
            run_processes(dims.world_size, averaged, case, dims, first_step), expected, strict=True
        ):
            assert math.isnan(result.losses[silent]) and result.norms[silent] == 0.0
            assert result.losses[1 - silent] == single.losses[0]
            compare(result.weights, single.weights, way)
            compare(result.optimizer, single.optimizer, way)
