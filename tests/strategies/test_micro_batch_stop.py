"""A stop between two micro-batches: all ranks leave together, and the step that they leave has left no trace.

Oracle: the same run without the step that was left; weights and optimizer state are equal in every bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training import step as micro_batch_stop
from tests.support.plain_training import assembled
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.training import Case, Outcome, trained

STEPS = 2
CASE = Case(steps=STEPS, micro_batches=4, max_norm=0.5)


class Stopped(pl.Callback):
    """Ends the fit with the step that was left, as the run's recorder does."""

    def __init__(self) -> None:
        self.abandoned = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs["result"].abandoned:
            self.abandoned += 1
            trainer.should_stop = True


def ask(asked: dict[str, int], told: Stopped, strategy: Any) -> None:
    """Ask one rank to stop, in the middle of the step after the last one that counts."""
    strategy.lightning_module.trainer.callbacks.append(told)

    def requested() -> bool:
        asked["votes"] += 1
        return strategy.global_rank == 1 and asked["votes"] == STEPS * CASE.micro_batches + 2

    strategy.micro_batch_stop._requested = requested


def both(case: Case, dims: ParallelDims) -> tuple[Outcome, Outcome, int]:
    """Without the step that is left, with it, and how many steps were."""
    expected = trained(case, dims)
    micro_batch_stop.VOTE_EVERY_S = 0.0  # at every boundary: these micro-batches take milliseconds
    told = Stopped()
    outcome = trained(replace(case, steps=STEPS + 1), dims, on_start=partial(ask, {"votes": 0}, told))
    return expected, outcome, told.abandoned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    one_in(
        2,
        [
            ({"dp_replicate": 2}, {}),
            ({"dp_shard": 2}, {"precision": "fp16"}),
            ({"tp": 2}, {}),
            ({"dp_shard": 2}, {"zero_stage": 2}),
            ({"dp_shard": 2}, {"zero_stage": 3}),
        ],
    ),
    ids=["ddp", "fsdp-fp16", "tp", "zero2", "zero3"],
)
def test_the_step_that_was_left_has_left_no_trace(sizes: dict[str, int], options: dict[str, Any]) -> None:
    case, dims = replace(CASE, **options), ParallelDims(**sizes)
    found = run_processes(2, both, case, dims)
    assert [abandoned for _, _, abandoned in found] == [1, 1]
    for part in ("weights", "optimizer"):
        truth, ours = (assembled([getattr(rank[which], part) for rank in found]) for which in (0, 1))
        assert ours.keys() == truth.keys() and all(torch.equal(ours[name], truth[name]) for name in truth)


def test_a_short_step_is_never_left_and_votes_nowhere() -> None:
    stop = micro_batch_stop.MicroBatchStop.__new__(micro_batch_stop.MicroBatchStop)
    stop._requested, stop._group, stop._step_s = (lambda: True), None, 0.01
    assert not any(stop.should_leave(done, 16) for done in range(17))
    stop._step_s = 3600.0
    assert [done for done in range(17) if stop.should_leave(done, 16)] == list(range(1, 16))
