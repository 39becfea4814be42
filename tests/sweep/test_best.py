"""The best point, with the noise of its seeds in view. Oracle: the statistics module."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from mgpu_pipe.sweep.best import ranked, repeat_line
from mgpu_pipe.sweep.point import Point
from mgpu_pipe.sweep.store import create
from tests.sweep.support import asked


def runs(trial: int, *values: float, status: str = "finished") -> list[Point]:
    return [
        Point(trial * 10 + at, (f"optimizer.lr={trial}",), trial, status=status, metrics={"val/loss": value})
        for at, value in enumerate(values)
    ]


def test_the_mean_counts_with_its_interval() -> None:
    first, second = [2.0, 2.2, 2.4], [1.0, 1.2, 1.1]
    best, other = ranked([*runs(1, *first), *runs(2, *second)], "val/loss", minimize=True)
    assert [best.first.trial, other.first.trial] == [2, 1] and not other.alike
    spread = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    assert math.isclose(best.mean, statistics.mean(second))
    assert math.isclose(best.error, 2.78 * spread / math.sqrt(3))


def test_a_lucky_run_does_not_win_over_a_mean() -> None:
    trials = ranked([*runs(1, 1.99), *runs(2, 2.0, 2.1, 1.9), *runs(3, 9.0, 9.2)], "val/loss", minimize=True)
    assert [trial.first.trial for trial in trials] == [2, 1, 3]
    assert [trial.alike for trial in trials] == [False, True, False]


def test_trials_with_a_run_that_did_not_finish_are_left_out() -> None:
    points = [*runs(1, 1.0), *runs(1, 1.0, status="diverged"), *runs(2, 3.0), *runs(3, math.nan)]
    assert [trial.first.trial for trial in ranked(points, "val/loss", minimize=True)] == [2]


def test_higher_may_be_better() -> None:
    trials = ranked([*runs(1, 0.2), *runs(2, 0.9)], "val/loss", minimize=False)
    assert trials[0].first.trial == 2 and math.isnan(trials[0].error)


def test_the_command_that_repeats_a_point_asks_for_no_sweep(tmp_path: Path) -> None:
    store = create(tmp_path, "mine", asked(fixed=["model=llama_tiny", "sweep.search=tpe", "+sweep.space.seed=[1,2]"]))
    (point,) = store.add([[["seed=2"]]])
    assert repeat_line(store, point) == "mgpu-pipe model=llama_tiny seed=2"
