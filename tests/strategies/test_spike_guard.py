"""Steps whose gradient norm stands out leave the weights as they are, under every strategy. Oracle: the plain loop,
whose optimizer measures the norm itself and does nothing at a spike."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from mgpu_pipe.config.group_keys import SpikeGuardConfig
from mgpu_pipe.optim.gradients import SpikeGuard
from mgpu_pipe.topology import ParallelDims
from tests.support.plain_training import plain, worst_error
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, trained
from tests.support.ways import WAYS

STEPS, WINDOW, FACTOR = 6, 2, 1.0
"""So that norms which hardly differ are spikes every now and then."""
SAMPLED = ("ddp 2", "pp 2", "zero2 2", "zero3 2")


class Guarded(torch.optim.AdamW):
    made: Guarded

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        self.norms: list[float] = []
        self.skipped: list[int] = []
        Guarded.made = self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
        before = self.norms[-WINDOW:]
        self.norms.append(norm)
        if len(before) == WINDOW and norm > FACTOR * statistics.median(before):
            self.skipped.append(len(self.norms))
        else:
            super().step()


def guarded(case: Case, dims: ParallelDims) -> Outcome:
    def watch(strategy: Any) -> None:
        strategy.spike_guard = SpikeGuard(SpikeGuardConfig(factor=FACTOR, window=WINDOW))

    return trained(case, dims, on_start=watch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.exhaustive) for name in WAYS]
)
def test_spikes_are_skipped_as_one_process_skips_them(way: str) -> None:
    dims, more = WAYS[way]
    expected = plain(Case(steps=STEPS, layers=2, by_hand=Guarded))
    skipped = Guarded.made.skipped
    assert len(skipped) > 1 and STEPS not in skipped, skipped
    results = run_processes(dims.world_size, guarded, Case(steps=STEPS, layers=2, **more), dims)
    worst, where = worst_error(results, expected)
    assert worst <= 1, where


def test_a_spike_is_measured_by_the_median_of_full_windows() -> None:
    guard = SpikeGuard(SpikeGuardConfig(factor=3.0, window=3))
    norms = [9.0, 1.0, 1.0, 2.9, 3.1, 50.0, 50.0, 50.0, 50.0]
    found = [guard.refuses(step, norm) for step, norm in enumerate(norms)]
    assert found == [False] * 4 + [True] * 3 + [False] * 2
    again = SpikeGuard(SpikeGuardConfig(factor=3.0, window=3))
    again.restore(guard.state()["gradient_norms"])
    assert again.state() == guard.state() == {"gradient_norms": [50.0, 50.0, 50.0]}
    assert again.refuses(9, 151.0) and not again.refuses(10, 100.0)
    off = SpikeGuard()
    assert not any(off.refuses(step, 10.0**step) for step in range(200)) and off.state() == {}


def test_a_stop_keeps_the_norms_of_the_steps_that_were_taken() -> None:
    guard = SpikeGuard(SpikeGuardConfig(factor=2.0, window=2, action="stop"))
    assert [guard.refuses(step, norm) for step, norm in enumerate([1.0, 1.0, 5.0])] == [False, False, True]
    assert guard.state() == {"gradient_norms": [1.0, 1.0]}
    assert str(guard.stopped_by) == "the gradient norm of step 3 is 5, 5 times the median of the steps before it"
