"""The useful share of a run's time. Oracle: a simulation of saves and failures, one event after the other."""

from __future__ import annotations

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.planning.goodput import Failures, best_interval, useful_share
from mgpu_pipe.report.overview import goodput_line

SEGMENTS = 300_000
LLAMA3 = Failures.from_gpus(54 * 24 * 16_384 / 419, 16_384, stall=10.0, restart=600.0)
"""419 interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4)."""


def simulated(interval: float, failures: Failures, random: np.random.Generator) -> float:
    """The useful share over many intervals, each repeated until no failure comes before its save ends."""
    taken = np.zeros(SEGMENTS)
    waiting, needed = np.arange(SEGMENTS), interval + failures.stall
    while waiting.size:
        until = random.exponential(failures.between, waiting.size)
        taken[waiting] += np.minimum(until, needed)
        waiting = waiting[until < needed]
        needed = failures.restart + interval + failures.stall
    return float(interval * SEGMENTS / taken.sum())


def test_the_closed_form_is_the_simulation_within_three_tenths_of_a_point() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        between = 10 ** random.uniform(3, 6)
        failures = Failures(between, between * 10 ** random.uniform(-4, -1), between * 10 ** random.uniform(-3, -0.5))
        interval = between * 10 ** random.uniform(-3, 0)
        assert useful_share(interval, failures) == pytest.approx(simulated(interval, failures, random), abs=0.003)


@pytest.mark.parametrize("failures", [LLAMA3, Failures(1e4, 60, 900), Failures(1e6, 1, 60), Failures(100, 300, 50)])
def test_no_other_interval_is_better(failures: Failures) -> None:
    best = best_interval(failures)
    assert 0 < best < failures.between
    for factor in (0.8, 0.99, 1.01, 1.25):
        assert useful_share(best * factor, failures) < useful_share(best, failures)


def test_check_says_how_often_to_save() -> None:
    words: tuple[str, ...] = (
        "trainer.accelerator=cuda",
        "trainer.devices=8",
        "trainer.num_nodes=2048",
        "strategy=fsdp",
    )
    words += ("data.global_batch_size=16384", "plan.failure_hours=50680")

    def line_of(*words: str) -> str | None:
        config, _ = compose([*words])
        return goodput_line(config.plan, config.checkpoint.every_n_minutes, world_size(config.trainer, config.strategy))

    line = line_of(*words)
    assert line is not None and "90.8% of the time is useful" in line and "checkpoint.every_n_minutes=" in line
    assert line_of(*words[:-1]) is None
    seldom = line_of(*words, "checkpoint.every_n_minutes=120")
    assert seldom is not None and "with checkpoint.every_n_minutes=120" in seldom


def test_failures_that_no_attempt_outlives_leave_no_useful_time() -> None:
    assert useful_share(10.0, Failures(between=0.01, stall=1.0, restart=600.0)) == 0.0
