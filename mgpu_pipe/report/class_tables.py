"""Figures of each class and of the confidence, from what an objective finds in held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_ROWS = 50
"""Most classes of a table; with more it has the least accurate."""
LEAST_ACCURATE = 20
"""Classes of a table that cannot have all."""


@dataclass(frozen=True)
class ClassFigures:
    """Figures of one class.

    Attributes:
        name: of the class.
        samples: held-out samples of the class.
        right: those among them that were taken for it.
        predicted: all samples that were taken for it.
        accuracy: ``right / samples`` (recall); None without samples.
        precision: ``right / predicted``; None if none was taken for it.
        taken_for: name of the other class that its samples were taken for most often; empty for none or unknown.
    """

    name: str
    samples: int
    right: int
    predicted: int
    accuracy: float | None
    precision: float | None
    taken_for: str


def class_figures(findings: Mapping[str, Any], names: Sequence[str]) -> list[ClassFigures]:
    """Figures of every class.

    Args:
        findings: of :meth:`mgpu_pipe.objectives.class_sums.ClassSums.findings`.
        names: of the classes, in the order of their numbers.
    """
    counts, confusion = findings["classes"], findings.get("confusion")
    figures = []
    for number, (name, samples, right, predicted) in enumerate(
        zip(names, counts["samples"], counts["right"], counts["predicted"], strict=True)
    ):
        others = [
            (count, -other) for other, count in enumerate(confusion[number] if confusion else ()) if other != number
        ]
        count, other = max(others, default=(0, 0))
        accuracy, precision = (right / whole if whole else None for whole in (samples, predicted))
        figures.append(
            ClassFigures(name, samples, right, predicted, accuracy, precision, names[-other] if count else "")
        )
    return figures


def class_lines(findings: Mapping[str, Any], names: Sequence[str], width: int) -> list[str]:
    """Lines for a terminal: the calibration of one class a sample, then a table of the classes whose first column has
    this width."""
    figures, lines = class_figures(findings, names), list[str]()
    if "calibration" in findings:
        error, bins = 100 * findings["calibration"]["expected_error"], len(findings["calibration"]["bins"])
        lines = [f"{'calibration':<{width}}{error:.2f}% expected error, {bins} of 15 bins of confidence have samples"]
    if len(figures) > MAX_ROWS:
        figures = sorted(figures, key=lambda row: 2.0 if row.accuracy is None else row.accuracy)[:LEAST_ACCURATE]
        lines.append(
            f"{'classes':<{width}}{len(names)}, of which the {LEAST_ACCURATE} least accurate follow; --json has all"
        )
    width = max(width, *(len(row.name) + 2 for row in figures))
    lines.append(f"{'class':<{width}}{'samples':>9}{'accuracy':>11}{'precision':>11}  most often taken for")
    for row in figures:
        shares = "".join(f"{_percent(share):>11}" for share in (row.accuracy, row.precision))
        lines.append(f"{row.name:<{width}}{row.samples:>9}{shares}  {row.taken_for}".rstrip())
    return lines


def class_values(findings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Values for JSON: ``classes``, a list of :class:`ClassFigures`; ``calibration``; ``confusion`` if there is one."""
    return {**findings, "classes": [asdict(row) for row in class_figures(findings, names)]}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}%"
