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


SILENT = ((0, 0), (1, 2))
"""The first step, and the one without labels: before the step that counts, and after it."""


def averaged(more: dict[str, Any], dims: ParallelDims) -> list[Outcome]:
    """Training of the counted step alone, then with each silent one; an average of the weights is state too."""

    def watch(strategy: Any) -> None:
        strategy.average.decay = 0.5

    cases = [(Case(steps=1, layers=2, **more), 1)]
    cases += [(Case(steps=2, layers=2, uncounted=(silent,), **more), first) for first, silent in SILENT]
    return [trained(case, dims, first_step, on_start=watch) for case, first_step in cases]


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
    for alone, *others in run_processes(dims.world_size, averaged, more, dims):
        for outcome, (first_step, silent) in zip(others, SILENT, strict=True):
            at = silent - first_step
            assert math.isnan(outcome.losses[at]) and outcome.norms[at] == 0.0
            assert outcome.losses[1 - at] == alone.losses[0]
            compare(outcome.weights, alone.weights, way)
            compare(outcome.optimizer, alone.optimizer, way)
