"""Fits the constants of the formulas to measured seconds, in logarithms around their priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.planning.work import Constants, spread

Array = NDArray[np.float64]
NOISE = 0.05
"""Share by which a measured time is off, as a rule; larger errors count by their size, not by its square."""


def fit(
    predict: Callable[[Constants], Array],
    seconds: Array,
    free: Sequence[str],
    start: Constants | None = None,
    width: float | None = None,
    rounds: int = 40,
) -> Constants:
    """Constants that predict ``seconds``, in logarithms around ``start``, by damped Gauss-Newton steps.

    Args:
        predict: predicted seconds of every row.
        free: names of the constants that are fitted.
        width: standard deviation of a constant's logarithm around ``start``; each constant's own where None.
    """
    start = start or Constants()
    centre = np.log([getattr(start, name) for name in free])
    prior = np.array([width or spread(name) for name in free])

    def constants(point: Array) -> Constants:
        return replace(start, **dict(zip(free, np.exp(point).tolist(), strict=True)))

    def residuals(point: Array) -> Array:
        errors: Array = np.log(predict(constants(point)) / seconds)
        return errors

    def loss(res: Array, point: Array) -> float:
        return float(np.sum(np.sqrt((res / NOISE) ** 2 + 0.05)) + 0.5 * np.sum(((point - centre) / prior) ** 2))

    point, damping = centre.copy(), 1e-2
    res = residuals(point)
    best = loss(res, point)
    for _ in range(rounds):
        jacobian = np.stack(
            [(residuals(point + 1e-4 * np.eye(len(free))[i]) - res) / 1e-4 for i in range(len(free))], 1
        )
        weight = 1 / np.sqrt((res / NOISE) ** 2 + 0.05) / NOISE**2
        hessian = (jacobian.T * weight) @ jacobian + np.diag(1 / prior**2)
        slope = jacobian.T @ (weight * res) + (point - centre) / prior**2
        for _ in range(12):
            move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), slope)
            trial = point - np.clip(move, -0.5, 0.5)
            errors = residuals(trial)
            value = loss(errors, trial)
            if value < best:
                is_done = best - value < 1e-5
                point, res, best, damping = trial, errors, value, max(1e-6, damping / 4)
                break
            damping *= 4
        else:
            break
        if is_done:
            break
    return constants(point)
