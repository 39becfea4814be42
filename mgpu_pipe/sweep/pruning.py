"""Which runs go on and which stay behind: successive halving (ASHA) and the median rule, at rungs of steps.

A run trains to a rung, evaluates, saves, and ends its launch. It goes on to the next rung, from its own checkpoint,
once the rule promotes it, perhaps much later. The learning rate's schedule has the whole length at every rung.

ASHA: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2.
Median: Golovin et al., "Google Vizier", KDD 2017, section 3.2.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

Rule = Literal["asha", "median"]
REDUCTION = 3
"""Of the runs at a rung, one in so many goes on; and a rung has so many times the steps of the one before."""
RUNGS = 3
"""Of a whole run's steps, where ``sweep.rungs`` does not say: a ninth, a third, all."""
STARTUP = 4
"""Runs at a rung before the median says anything."""


def rungs_of(steps: int, given: Sequence[int] = ()) -> list[int]:
    """Steps of every rung, ascending; the last one is the whole run."""
    below = sorted({*given} if given else {steps // REDUCTION**power for power in range(1, RUNGS)})
    return [*(rung for rung in below if 0 < rung < steps), steps]


def promoted(reached: Mapping[int, Mapping[int, float]], rungs: Sequence[int], minimize: bool, rule: Rule) -> list[int]:
    """The runs that go on now, those nearest to the end first.

    Args:
        reached: of every run, its metric at the rungs that it has reached, by the run's number.
        rungs: ascending; nothing goes on after the last one.
    """
    sign = 1.0 if minimize else -1.0
    going: list[int] = []
    for at in reversed(range(len(rungs) - 1)):
        rung, later = rungs[at], rungs[at + 1 :]
        here = {number: sign * values[rung] for number, values in reached.items() if rung in values}
        best_first = sorted(here, key=lambda number: (here[number], number))
        if rule == "asha":
            chosen = best_first[: len(here) // REDUCTION]
        else:
            chosen = [number for number in best_first if _among_the_better(number, here)]
        going += [number for number in chosen if not any(step in reached[number] for step in later)]
    return going


def _among_the_better(number: int, here: Mapping[int, float]) -> bool:
    return len(here) < STARTUP or here[number] <= statistics.median(here.values())
