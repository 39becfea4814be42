"""Searches on 300 short runs, recorded in ``benchmarks/results``. Oracles: random draws, the best run."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.accuracy.sweep_search import FIRST, SAMPLED, SEEDS, asha, curves, loss, regret
from benchmarks.support import RESULTS
from scripts.sweep_curves import STEPS, grid

FIGURES = {row["what"]: row for row in json.loads((RESULTS / "sweep_search-cpu.json").read_text())["rows"]}


def test_the_table_is_interpolated_between_its_runs() -> None:
    points = grid()
    assert len(curves()) == 300
    for point in points[::37]:
        assert loss(point) == pytest.approx(curves()[point][STEPS], rel=1e-9)
    rate, decay, _ = points[0]
    ends = curves()[rate, decay, 12.0][STEPS], curves()[rate, decay, 24.0][STEPS]
    assert loss((rate, decay, 18.0)) == pytest.approx(statistics.mean(ends), rel=1e-9)


@pytest.mark.slow
def test_tpe_finds_better_runs_than_random_draws() -> None:
    pytest.importorskip("optuna")
    for seeds in ("mean regret after 30 trials, tpe", f"tpe, of the first {FIRST} seeds alone"):
        assert FIGURES[seeds]["ratio"] <= 0.7
    sampled = statistics.mean(regret("tpe", seed) for seed in range(SAMPLED))
    committed = FIGURES[f"tpe, of the first {SAMPLED} seeds"]["value"]
    assert sampled == pytest.approx(committed, rel=1e-6), "the figures are this code's"


@pytest.mark.exhaustive
def test_tpes_regret_over_all_seeds() -> None:
    pytest.importorskip("optuna")
    tpe, drawn = (statistics.mean(regret(kind, seed) for seed in range(SEEDS)) for kind in ("tpe", "random"))
    assert tpe <= 0.7 * drawn


def test_asha_spends_little_and_ends_near_the_best() -> None:
    shares, excesses = zip(*(asha(seed) for seed in range(5)), strict=True)
    assert max(shares) <= 0.4 and max(excesses) <= 0.02
