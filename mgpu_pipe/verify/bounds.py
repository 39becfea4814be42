"""What counts as the same result, and where a comparison was worst."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import isfinite

LOSS = NORM = WEIGHTS = GRADIENT = 1e-5
GRADIENT_OF_ALL = 1e-7
"""Share of the norm of all gradients: some, such as those of key biases, are zero in exact arithmetic."""
INITIAL = 0.0
"""Initial weights are keyed by (seed, parameter name): the same bits."""
BF16_FACTOR = 1.5
QUANTITIES = ("initial weights", "loss", "gradient norm", "gradient", "weights")


@dataclass(frozen=True)
class Measurement:
    """One comparison of the strategy with the plain fp32 computation.

    Attributes:
        where: the parameter, or the rank.
        step: one-based; 0 is before the first step.
        error: relative for loss, norm and weights; for a gradient in units of the norm of all gradients.
        bound: the fp32 bound on it, in the same units.
        alone: the error of one bf16 process; None under fp32.
    """

    quantity: str
    where: str
    step: int
    error: float
    bound: float
    alone: float | None = None


@dataclass(frozen=True)
class Worst:
    """The comparison of a quantity that came closest to its bound, or exceeded it most."""

    quantity: str
    error: float
    bound: float
    step: int
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound; infinite where a bound of zero is exceeded or the error is no number."""
        if not isfinite(self.error):
            return float("inf")
        return self.error / self.bound if self.bound else float("inf") if self.error else 0.0

    def as_dict(self) -> dict[str, object]:
        """For JSON; an error that is not finite is None."""
        error = self.error if isfinite(self.error) else None
        return {**asdict(self), "error": error, "passed": self.passed}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Worst:
        error = float("inf") if values["error"] is None else float(str(values["error"]))
        return cls(
            str(values["quantity"]), error, float(str(values["bound"])), int(str(values["step"])), str(values["where"])
        )


def bounds(precision: str) -> dict[str, float]:
    """The bounds in words, for the certificate."""
    texts = {
        "loss": LOSS,
        "gradient_norm": NORM,
        "gradient": GRADIENT,
        "gradient_of_all": GRADIENT_OF_ALL,
        "weights": WEIGHTS,
        "initial_weights": INITIAL,
    }
    return texts if precision == "fp32" else {**texts, "low_precision_factor": BF16_FACTOR}


def worst_of(measurements: Iterable[Measurement]) -> list[Worst]:
    """The worst of every quantity, in the order of ``QUANTITIES``.

    fp32: every comparison has its bound. bf16: the error may be ``BF16_FACTOR`` times that of one bf16 process, and
    the fp32 bound more. There the steps of a quantity (of one parameter) are taken together as the root of their
    mean square, since the rounding errors of one step may cancel by luck, on either side.
    """
    by_quantity: dict[str, Worst] = {}
    for judged in _judged(list(measurements)):
        worst = by_quantity.get(judged.quantity)
        if worst is None or judged.ratio > worst.ratio:
            by_quantity[judged.quantity] = judged
    return [by_quantity[quantity] for quantity in QUANTITIES if quantity in by_quantity]


def _judged(measurements: list[Measurement]) -> list[Worst]:
    pooled: dict[tuple[str, str], list[Measurement]] = {}
    judged: list[Worst] = []
    for one in measurements:
        if one.alone is None:
            judged.append(Worst(one.quantity, one.error, one.bound, one.step, one.where))
        else:
            # The weights are judged as a whole; where they are worst changes from step to step.
            pooled.setdefault((one.quantity, "" if one.quantity == "weights" else one.where), []).append(one)
    for (quantity, _), steps in pooled.items():
        bound = BF16_FACTOR * _root_mean_square(one.alone or 0.0 for one in steps)
        bound += _root_mean_square(one.bound for one in steps)
        worst = max(steps, key=lambda one: one.error)
        error = _root_mean_square(one.error for one in steps)
        judged.append(Worst(quantity, error, bound, worst.step, worst.where))
    return judged


def _root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return (sum(squares) / len(squares)) ** 0.5
