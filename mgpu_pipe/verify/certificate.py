"""``certificate.json`` and its table."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from mgpu_pipe.report.columns import print_bold, print_columns
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.verify.shrink import Shrunk

LOSS = NORM = WEIGHTS = GRADIENT = 1e-5
GRADIENT_OF_ALL = 1e-7
"""Share of the norm of all gradients, since some (e.g. of key biases) are zero in exact arithmetic."""
INITIAL = 0.0
"""Initial weights are keyed by (seed, parameter name), so bits are equal."""
BF16_FACTOR = 1.5
QUANTITIES = ("initial weights", "loss", "gradient norm", "gradient", "weights")


@dataclass(frozen=True)
class Measurement:
    """Comparison of the strategy with the plain fp32 computation.

    Attributes:
        where: parameter or rank.
        step: one-based; 0 is before the first step.
        error: relative for loss, norm and weights; for a gradient in units of the norm of all gradients.
        bound: fp32 bound in the same units.
        alone: error of one bf16 process; None under fp32.
    """

    quantity: str
    where: str
    step: int
    error: float
    bound: float
    alone: float | None = None


@dataclass(frozen=True)
class Worst:
    """Comparison of a quantity closest to its bound, or furthest above it."""

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
        """Error over bound; infinite if a bound of zero is exceeded or the error is not finite."""
        if not isfinite(self.error):
            return float("inf")
        return self.error / self.bound if self.bound else float("inf") if self.error else 0.0

    def as_dict(self) -> dict[str, object]:
        """Values for JSON; an error that is not finite is None."""
        error = self.error if isfinite(self.error) else None
        return {**asdict(self), "error": error, "passed": self.passed}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Worst:
        error = float("inf") if values["error"] is None else float(str(values["error"]))
        return cls(
            str(values["quantity"]), error, float(str(values["bound"])), int(str(values["step"])), str(values["where"])
        )


def bounds(precision: str) -> dict[str, float]:
    """Bounds by quantity, for the certificate."""
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
    """Worst comparison of every quantity, in the order of ``QUANTITIES``.

    fp32: every comparison has its bound. bf16: the error may be ``BF16_FACTOR`` times that of one bf16 process plus the
    fp32 bound. In bf16 the root mean square over all steps of a quantity (of a parameter) counts, because rounding
    errors of a step may cancel by chance on either side.
    """
    by_quantity: dict[str, Worst] = {}
    for judged in _judge(list(measurements)):
        worst = by_quantity.get(judged.quantity)
        if worst is None or judged.ratio > worst.ratio:
            by_quantity[judged.quantity] = judged
    return [by_quantity[quantity] for quantity in QUANTITIES if quantity in by_quantity]


def _judge(measurements: list[Measurement]) -> list[Worst]:
    pooled: dict[tuple[str, str], list[Measurement]] = {}
    judged: list[Worst] = []
    for measurement in measurements:
        if measurement.alone is None:
            judged.append(
                Worst(measurement.quantity, measurement.error, measurement.bound, measurement.step, measurement.where)
            )
        else:
            # All weights are judged together; the worst parameter changes from step to step.
            pooled.setdefault(
                (measurement.quantity, "" if measurement.quantity == "weights" else measurement.where), []
            ).append(measurement)
    for (quantity, _), steps in pooled.items():
        bound = BF16_FACTOR * _root_mean_square(step.alone or 0.0 for step in steps)
        bound += _root_mean_square(step.bound for step in steps)
        worst = max(steps, key=lambda step: step.error)
        error = _root_mean_square(step.error for step in steps)
        judged.append(Worst(quantity, error, bound, worst.step, worst.where))
    return judged


def _root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return (sum(squares) / len(squares)) ** 0.5


CERTIFICATE = "certificate.json"
UNITS = {
    "initial_weights": "2-norm of a parameter's difference",
    "loss": "relative",
    "gradient_norm": "relative",
    "gradient": "2-norm of a parameter's difference over the 2-norm of all gradients",
    "weights": "2-norm of all parameters' differences over the 2-norm of all parameters",
}
"""Units of each error and its bound."""


@dataclass(frozen=True)
class Certificate:
    """Result of a verification."""

    worst: list[Worst]
    values: dict[str, object]

    @property
    def passed(self) -> bool:
        return holds(self.worst)

    def write(self, folder: Path) -> Path:
        path = folder / CERTIFICATE
        path.write_text(json.dumps(self.values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


def holds(worst: Sequence[Worst]) -> bool:
    """Whether every quantity was compared and is within its bound."""
    return {comparison.quantity for comparison in worst} == set(QUANTITIES) and all(
        comparison.passed for comparison in worst
    )


def certificate(
    configured: str,
    overrides: Sequence[str],
    small: Shrunk,
    dims: ParallelDims,
    worst: list[Worst],
    comparisons: int,
    environment: Mapping[str, object],
) -> Certificate:
    """Certificate with all that a reader needs to judge and to repeat the verification.

    Args:
        configured: hash of the configured run, which identifies the certificate.
        comparisons: number of comparisons.
        environment: result of :func:`mgpu_pipe.runs.environment.describe_environment`.
    """
    plan = BatchPlan.resolve(small.config.data, dims.data_parallel_size, dims.pp)
    precision = small.config.precision.name
    values: dict[str, object] = {
        "passed": holds(worst),
        "config_hash": configured,
        "overrides": list(overrides),
        "versions": _versions(environment),
        "model": small.config.model.name,
        "strategy": small.config.strategy.name,
        "precision": precision,
        "topology": dims.as_dict(),
        "world_size": dims.world_size,
        "steps": small.config.trainer.max_steps,
        "micro_batches": plan.num_micro_batches,
        "comparisons": comparisons,
        "bounds": bounds(precision),
        "units": UNITS,
        "worst": {comparison.quantity.replace(" ", "_"): _without_name(comparison) for comparison in worst},
        "shrunk": small.changes,
        "date": environment["date"],
    }
    return Certificate(worst, values)


def show(result: Certificate, title: str) -> None:
    """Prints the table: every quantity with its worst comparison."""
    names = ("quantity", "error", "bound", "step", "", "where it is worst")
    rows = [
        (
            comparison.quantity,
            f"{comparison.error:.1e}" if comparison.error else "0",
            f"{comparison.bound:.1e}" if comparison.bound else "0",
            str(comparison.step),
            "pass" if comparison.passed else "FAIL",
            comparison.where if comparison.error else "-",
        )
        for comparison in result.worst
    ]
    print_bold(title)
    print_columns(names, rows, ("error", "bound", "step"), width=shutil.get_terminal_size().columns)
    sys.stdout.flush()


def failures(result: Certificate) -> list[str]:
    """One line for each broken bound: what, where, and in which step; and for each quantity that was not compared."""
    compared = {comparison.quantity for comparison in result.worst}
    return [*(f"{name}: was not compared" for name in QUANTITIES if name not in compared), *_broken_bounds(result)]


def _broken_bounds(result: Certificate) -> list[str]:
    lines = []
    for worst in result.worst:
        if not worst.passed:
            when = f"step {worst.step}" if worst.step else "before the first step"
            numbers = f"error {worst.error:.3g}, bound {worst.bound:.3g}"
            lines.append(f"{worst.quantity}, {worst.where}, {when}: not that of one process; {numbers}")
    return lines


def _without_name(comparison: Worst) -> dict[str, object]:
    return {name: value for name, value in comparison.as_dict().items() if name != "quantity"}


def _versions(environment: Mapping[str, object]) -> dict[str, object]:
    packages = environment["packages"]
    assert isinstance(packages, Mapping)
    return {"mgpu_pipe": environment["mgpu_pipe"], "python": environment["python"], **packages}
