"""``certificate.json``, and the table that shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.freeze import config_hash
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.verify.bounds import QUANTITIES, Worst, bounds
from mgpu_pipe.verify.shrink import Shrunk

CERTIFICATE = "certificate.json"
UNITS = {
    "initial_weights": "2-norm of a parameter's difference",
    "loss": "relative",
    "gradient_norm": "relative",
    "gradient": "2-norm of a parameter's difference over the 2-norm of all gradients",
    "weights": "2-norm of all parameters' differences over the 2-norm of all parameters",
}
"""What each error and its bound are measured in."""


@dataclass(frozen=True)
class Certificate:
    """What was verified and how it ended."""

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
    return {one.quantity for one in worst} == set(QUANTITIES) and all(one.passed for one in worst)


def certificate(
    config: RunConfig,
    overrides: Sequence[str],
    small: Shrunk,
    dims: ParallelDims,
    worst: list[Worst],
    comparisons: int,
    environment: Mapping[str, object],
) -> Certificate:
    """Put together what a reader needs to judge, and to repeat, the verification.

    Args:
        config: as configured; its hash identifies what is certified.
        comparisons: how many comparisons were made.
        environment: of :func:`mgpu_pipe.runs.environment.describe_environment`.
    """
    plan = BatchPlan.resolve(small.config.data, dims.data_parallel_size, dims.pp)
    precision = small.config.precision.name
    values: dict[str, object] = {
        "passed": holds(worst),
        "config_hash": config_hash(config),
        "overrides": list(overrides),
        "versions": _versions(environment),
        "model": config.model.name,
        "strategy": config.strategy.name,
        "precision": precision,
        "topology": dims.as_dict(),
        "world_size": dims.world_size,
        "steps": small.config.trainer.max_steps,
        "micro_batches": plan.num_micro_batches,
        "comparisons": comparisons,
        "bounds": bounds(precision),
        "units": UNITS,
        "worst": {one.quantity.replace(" ", "_"): _without_name(one) for one in worst},
        "shrunk": small.changes,
        "date": environment["date"],
    }
    return Certificate(worst, values)


def show(result: Certificate, title: str) -> None:
    """Print the table on standard output: every quantity with its worst comparison."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("quantity", "error", "bound", "step"):
        table.add_column(name, justify="left" if name == "quantity" else "right", no_wrap=True)
    table.add_column("where it is worst", overflow="fold")
    table.add_column("")
    for one in result.worst:
        table.add_row(
            one.quantity,
            f"{one.error:.1e}" if one.error else "0",
            f"{one.bound:.1e}" if one.bound else "0",
            str(one.step),
            one.where if one.error else "-",
            "pass" if one.passed else "FAIL",
        )
    Console(file=sys.stdout, highlight=False, markup=False, emoji=False).print(table)


def failures(result: Certificate) -> list[str]:
    """One line for each broken bound: what, where, and in which step; and for each quantity that was not compared."""
    compared = {one.quantity for one in result.worst}
    return [*(f"{name}: was not compared" for name in QUANTITIES if name not in compared), *_broken(result)]


def _broken(result: Certificate) -> list[str]:
    return [
        f"{one.quantity}, {one.where}, {f'step {one.step}' if one.step else 'before the first step'}: not that of one "
        f"process; error {one.error:.3g}, bound {one.bound:.3g}"
        for one in result.worst
        if not one.passed
    ]


def _without_name(one: Worst) -> dict[str, object]:
    return {name: value for name, value in one.as_dict().items() if name != "quantity"}


def _versions(environment: Mapping[str, object]) -> dict[str, object]:
    packages = environment["packages"]
    assert isinstance(packages, Mapping)
    return {"mgpu_pipe": environment["mgpu_pipe"], "python": environment["python"], **packages}
