"""Fits the constants of the formulas to measured seconds, in logarithms around their priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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

    problem = _Problem(residuals, centre, prior)
    point, damping = centre.copy(), 1e-2
    for _ in range(rounds):
        step = problem.improve(point, damping)
        if step is None:
            break
        point, damping, gain = step
        if gain < 1e-5:
            break
    return constants(point)


@dataclass(frozen=True)
class _Problem:
    """Least squares of the errors' logarithms, with a Gaussian prior.

    Attributes:
        residuals: errors of all rows at a point.
        centre, prior: mean and standard deviation of the point's coordinates.
    """

    residuals: Callable[[Array], Array]
    centre: Array
    prior: Array

    def loss(self, errors: Array, point: Array) -> float:
        """Errors count by their squares up to :data:`NOISE`, beyond it by their size."""
        penalty = 0.5 * np.sum(((point - self.centre) / self.prior) ** 2)
        return float(np.sum(np.sqrt((errors / NOISE) ** 2 + 0.05)) + penalty)

    def improve(self, point: Array, damping: float) -> tuple[Array, float, float] | None:
        """The next point, its damping, and by how much its loss is lower; None where no step lowers it."""
        errors = self.residuals(point)
        steps = 1e-4 * np.eye(len(point))
        jacobian = np.stack([(self.residuals(point + step) - errors) / 1e-4 for step in steps], 1)
        weight = 1 / np.sqrt((errors / NOISE) ** 2 + 0.05) / NOISE**2
        hessian = (jacobian.T * weight) @ jacobian + np.diag(1 / self.prior**2)
        slope = jacobian.T @ (weight * errors) + (point - self.centre) / self.prior**2
        before = self.loss(errors, point)
        for _ in range(12):
            move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), slope)
            trial = point - np.clip(move, -0.5, 0.5)
            gain = before - self.loss(self.residuals(trial), trial)
            if gain > 0:
                return trial, max(1e-6, damping / 4), gain
            damping *= 4
        return None
