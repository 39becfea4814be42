"""The winner of a plan passes `check`, and the same layout with smaller axes computes what one process does.

Oracles: the checks of a run, and the comparison with one plain process."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from mgpu_pipe.checks.plan_layouts import plan_layouts
from mgpu_pipe.checks.preflight import preflight_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.planning.layout_search import Layout
from tests.verify.support import compared_with_one_process

CLUSTER = ["model=llama3_70b", "plan.hardware=[h100]", "trainer.num_nodes=8", "trainer.devices=8"]
"""The issue's show: 64 H100."""
AXES = ("dp_replicate", "dp_shard", "cp", "ep", "tp", "pp")
"""In the order in which a smaller world leaves them out."""


def scaled_down(layout: Layout, processes: int) -> tuple[Layout, int]:
    """The layout with every axis of 2 at most, on at most so many processes, and their number."""
    sizes = {axis: min(2, getattr(layout, axis)) for axis in AXES}
    for axis in AXES:
        if prod(sizes.values()) > processes:
            sizes[axis] = 1
    return replace(layout, **sizes, micro_batch_size=min(2, layout.micro_batch_size)), prod(sizes.values())


def test_axes_are_left_out_in_order() -> None:
    small, processes = scaled_down(Layout(8, 4, 1, 1, 2, 1, 4, 16, "full", True), 8)
    assert (small.tp, small.pp, small.dp_shard, small.stages_per_rank, processes) == (2, 2, 2, 4, 8)
    small, processes = scaled_down(small, 4)
    assert (small.tp, small.pp, small.dp_shard, processes) == (2, 2, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (CLUSTER, 4),
        pytest.param(CLUSTER, 8, marks=pytest.mark.exhaustive),
        pytest.param([*CLUSTER, "data.seq_len=4096", "data.global_batch_size=512"], 8, marks=pytest.mark.exhaustive),
        pytest.param([*CLUSTER[:2], "trainer.devices=8", "data.global_batch_size=8"], 4, marks=pytest.mark.exhaustive),
    ],
)
def test_the_winner_passes_check_and_verifies_scaled_down(words: list[str], processes: int) -> None:
    plans, _ = plan_layouts(compose([*words, "plan.rows=1"])[0])
    kept = [word for word in words if not word.startswith("trainer.")]
    assert not preflight_errors(compose([*kept, *plans[0].overrides])[0], elsewhere=True)
    layout, world = scaled_down(plans[0].layout, processes)
    assert 1 < world <= processes
    compared_with_one_process(world, *kept, *layout.overrides, "trainer.accelerator=cpu")
