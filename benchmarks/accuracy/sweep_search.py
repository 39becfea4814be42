"""How well searches do on 300 short real runs over learning rate, decay and warm-up (:mod:`scripts.sweep_curves`).

TPE against random draws: the mean regret after 30 trials on the table interpolated between its runs, over 200 seeds:
over 50 the ratio's standard error is 0.1.
ASHA on the recorded curves, all of them: the share of the full steps that it spends, and how far its end is from the
best run's. ``python -m benchmarks.accuracy.sweep_search``.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
import statistics
from collections.abc import Sequence

from benchmarks.support import finish
from mgpu_pipe.sweep.search import Kind, Tried, promoted_trials, rungs_of, suggest
from mgpu_pipe.sweep.space import parameter
from scripts.sweep_curves import DECAYS, KEYS, RATES, STEPS, TABLE, WARM_UPS, grid

TRIALS, SEEDS, FIRST, SAMPLED = 30, 200, 50, 10
SPACE = [
    parameter(KEYS[0], f"tag(log,interval({RATES[0]:.4g},{RATES[-1]:.4g}))"),
    parameter(KEYS[1], f"tag(log,interval({DECAYS[0]},{DECAYS[-1]}))"),
    parameter(KEYS[2], f"interval({WARM_UPS[0]},{WARM_UPS[-1]})"),
]
Point = tuple[float, float, float]


@functools.cache
def curves() -> dict[Point, dict[int, float]]:
    """The held-out losses of every run, by the step; where it diverged the largest one that any run reached."""
    header, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    steps = [int(step) for step in header.split(",")[len(KEYS) :]]
    cells = [[float(cell) for cell in line.split(",")] for line in lines]
    worst = max(cell for row in cells for cell in row if math.isfinite(cell))
    found = {
        (row[0], row[1], row[2]): dict(zip(steps, (min(cell, worst) for cell in row[len(KEYS) :]), strict=True))
        for row in cells
    }
    assert set(found) == set(grid()), f"{TABLE.name} has {len(found)} runs; python -m scripts.sweep_curves"
    return found


def loss(point: Point) -> float:
    """The last held-out loss between the recorded runs: linear in the logarithms of rate and decay, and in warm-up."""
    found = curves()
    rates = sorted({rate for rate, _, _ in found})
    near = [
        _between([math.log(rate) for rate in rates], rates, math.log(point[0])),
        _between([math.log(decay) for decay in DECAYS], DECAYS, math.log(point[1])),
        _between(WARM_UPS, WARM_UPS, point[2]),
    ]
    return math.fsum(
        math.prod(share for _, share in corner) * found[tuple(value for value, _ in corner)][STEPS]  # type: ignore[index, operator]
        for corner in itertools.product(*near)
    )


def _between(places: Sequence[float], values: Sequence[float], at: float) -> list[tuple[float, float]]:
    """The two values around a place, each with its share."""
    right = min(max(bisect.bisect_right(places, at), 1), len(places) - 1)
    share = min(1.0, max(0.0, (at - places[right - 1]) / (places[right] - places[right - 1])))
    return [(float(values[right - 1]), 1 - share), (float(values[right]), share)]


def regret(kind: Kind, seed: int) -> float:
    """How far the best of ``TRIALS`` is from the best there is."""
    tried: list[Tried] = []
    for _ in range(TRIALS):
        chosen = suggest(kind, SPACE, tried, [True], seed)
        rate, decay, warm_up = (float(chosen[key]) for key in KEYS)
        tried.append(Tried(chosen, [loss((rate, decay, warm_up))]))
    return min(one.values[0] for one in tried) - min(curve[STEPS] for curve in curves().values())


def asha(seed: int) -> tuple[float, float]:
    """Over all recorded runs in a random order: the share of the full steps, and the excess over the best loss."""
    rungs, recorded = rungs_of(STEPS), curves()
    fresh = random.Random(seed).sample(grid(), len(recorded))
    numbered: list[Point] = []
    reached: dict[int, dict[int, float]] = {}
    spent = 0
    while True:
        going = promoted_trials(reached, rungs, minimize=True, rule="asha")
        if not going and not fresh:
            break
        if going:
            number = going[0]
        else:
            number = len(numbered)
            numbered.append(fresh.pop())
            reached[number] = {}
        before = max(reached[number], default=0)
        rung = next(step for step in rungs if step > before)
        spent += rung - before
        reached[number][rung] = recorded[numbered[number]][rung]
    best = min(losses[STEPS] for losses in reached.values() if STEPS in losses)
    least = min(curve[STEPS] for curve in recorded.values())
    return spent / (STEPS * len(recorded)), best / least - 1


def main() -> None:
    found = {kind: [regret(kind, seed) for seed in range(SEEDS)] for kind in ("random", "tpe")}
    mean = {kind: statistics.mean(regrets) for kind, regrets in found.items()}
    shares, excesses = zip(*(asha(seed) for seed in range(FIRST)), strict=True)
    first = {kind: statistics.mean(regrets[:FIRST]) for kind, regrets in found.items()}
    rows = [
        ["mean regret after 30 trials, random", mean["random"], 1.0],
        ["mean regret after 30 trials, tpe", mean["tpe"], mean["tpe"] / mean["random"]],
        [f"tpe, of the first {FIRST} seeds alone", first["tpe"], first["tpe"] / first["random"]],
        [f"tpe, of the first {SAMPLED} seeds", statistics.mean(found["tpe"][:SAMPLED]), ""],
        ["steps that asha spends, of all", max(shares), max(shares)],
        ["loss that asha ends with, above the best", max(excesses), max(excesses)],
    ]
    notes = (
        f"Regret: held-out loss above the least of the table, mean of {SEEDS} seeds; ratio: over random draws. "
        f"The first {FIRST} seeds alone were tried first; their ratio varies by 0.1 from {FIRST} to {FIRST}. ASHA: "
        f"all {len(curves())} runs in {FIRST} random orders, the worst of them; its loss as a share of the best one."
    )
    finish("sweep_search", "Searches on recorded runs", ["what", "value", "ratio"], rows, notes)


if __name__ == "__main__":
    main()
