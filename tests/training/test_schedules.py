"""Oracle: the formulas of the cited papers, at their corners."""

import math
from itertools import pairwise

import pytest

from mgpu_pipe.config.schema import SchedulerConfig
from mgpu_pipe.optim.schedules import build_schedule


def factors(total: int, **fields) -> list[float]:
    schedule = build_schedule(SchedulerConfig(**fields), total)
    return [schedule(step) for step in range(total + 3)]


def test_warm_up_is_linear_and_reaches_the_peak():
    assert factors(10, name="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(10, name="cosine", warmup_ratio=0.31) == factors(10, name="cosine", warmup_steps=4)
    assert factors(10, name="cosine", warmup_ratio=0.0) == factors(10, name="cosine")


def test_cosine_is_half_way_at_half_time_and_keeps_its_floor_beyond_the_horizon():
    found = factors(100, name="cosine", min_lr_ratio=0.2)
    assert found[0] == 1.0
    assert math.isclose(found[50], 0.6)
    assert found[100] == found[102] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(found))


def test_linear_falls_evenly_after_the_warm_up():
    found = factors(12, name="linear", warmup_steps=2, min_lr_ratio=0.0)
    steps = [a - b for a, b in pairwise(found[2:13])]
    assert all(math.isclose(step, 0.1) for step in steps)


def test_wsd_is_stable_until_its_last_steps():
    found = factors(20, name="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    assert set(found[2:17]) == {1.0}
    assert found[17:21] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert factors(20, name="wsd", min_lr_ratio=0.0)[18:21] == pytest.approx([1.0, 0.5, 0.0])


def test_a_warm_up_longer_than_the_horizon_takes_all_of_it_and_reaches_the_peak():
    for name in ("constant", "linear", "cosine", "wsd"):
        found = factors(4, name=name, warmup_steps=10)
        assert found[:4] == [0.25, 0.5, 0.75, 1.0]
        assert found == factors(4, name=name, warmup_steps=4)
    assert factors(100, name="cosine", warmup_steps=10) != factors(4, name="cosine", warmup_steps=10)
