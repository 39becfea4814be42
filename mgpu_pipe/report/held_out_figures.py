"""Figures of an evaluation on held-out data, in all and by class, as lines for a terminal and as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import Description, bits_per_byte

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.inference.evaluate import Evaluation

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

    def shares(self) -> tuple[str, str]:
        """Accuracy and precision as texts."""
        accuracy, precision = (
            "-" if share is None else f"{100 * share:.2f}%" for share in (self.accuracy, self.precision)
        )
        return accuracy, precision


def class_figures(findings: Mapping[str, Any], names: Sequence[str]) -> list[ClassFigures]:
    """Figures of every class, by ``findings`` of ``ClassSums`` and ``names`` in the order of numbers."""
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


def shown_figures(figures: Sequence[ClassFigures]) -> tuple[Sequence[ClassFigures], int]:
    """The rows of a table, and the number of classes that it leaves out: of many it has the least accurate."""
    if len(figures) <= MAX_ROWS:
        return figures, 0
    ordered = sorted(figures, key=lambda row: 2.0 if row.accuracy is None else row.accuracy)
    return ordered[:LEAST_ACCURATE], len(figures) - LEAST_ACCURATE


def class_lines(findings: Mapping[str, Any], names: Sequence[str], width: int) -> list[str]:
    """Lines for a terminal: the calibration of one class a sample, then a table of the classes whose first column has
    this width."""
    (figures, left_out), lines = shown_figures(class_figures(findings, names)), list[str]()
    if "calibration" in findings:
        error, bins = 100 * findings["calibration"]["expected_error"], len(findings["calibration"]["bins"])
        lines = [f"{'calibration':<{width}}{error:.2f}% expected error, {bins} of 15 bins of confidence have samples"]
    if left_out:
        lines.append(
            f"{'classes':<{width}}{len(names)}, of which the {LEAST_ACCURATE} least accurate follow; --json has all"
        )
    width = max(width, *(len(row.name) + 2 for row in figures))
    lines.append(f"{'class':<{width}}{'samples':>9}{'accuracy':>11}{'precision':>11}  most often taken for")
    for row in figures:
        shares = "".join(f"{share:>11}" for share in row.shares())
        lines.append(f"{row.name:<{width}}{row.samples:>9}{shares}  {row.taken_for}".rstrip())
    return lines


def class_values(findings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Values for JSON: ``classes``, a list of :class:`ClassFigures`; ``calibration``; ``confusion`` if there is one."""
    return {**findings, "classes": [asdict(row) for row in class_figures(findings, names)]}


@dataclass(frozen=True)
class HeldOutFigures:
    """Result of an evaluation.

    Attributes:
        result: metrics and findings.
        described: the objective.
        prepared: the evaluated data.
        classes: names of the model's classes, in the order of their numbers.
    """

    result: Evaluation
    described: Description
    prepared: Prepared
    classes: list[str]

    def lines(self, width: int) -> Iterator[str]:
        """Yields lines for a terminal; names take ``width`` columns."""
        result, described = self.result, self.described
        for metric in described.metrics:
            value = result.metrics.get(metric.key, math.nan)
            figure = f"{100 * value:.2f}%" if metric.percent else f"{value:.{metric.digits}f}"
            yield f"{metric.name:<{width}}{figure} {metric.unit}".rstrip()
            baseline = None if metric.baseline is None else getattr(self.prepared, metric.baseline, None)
            if baseline is not None:
                unigram = f"{baseline:.{metric.digits}f} ({metric.name} of the token frequencies alone)"
                yield f"{'unigram':<{width}}{unigram}"
        for size in bits_per_byte(result.metrics, *self.prepared.evaluated_text()).values():
            yield f"{'bits/byte':<{width}}{size:.4f} bits of loss a byte of the text"
        yield (
            f"{'over':<{width}}{result.num_targets} {described.counts} of {result.samples} held-out samples, in fp32"
        )
        if "classes" in result.details:
            yield from class_lines(result.details, self.classes, width)
        if "zero_shot" in result.details:
            shot = result.details["zero_shot"]
            right, among = (f"{100 * shot[key]:.2f}%" for key in ("accuracy", "top5_accuracy"))
            templates = f"the mean of {shot['templates']} templates" if shot["templates"] > 1 else "one template"
            yield f"{'zero-shot':<{width}}{right} of {len(shot['names'])} classes, by {templates}; top-5 {among}"
            yield from class_lines(shot, shot["names"], width)

    def values(self) -> dict[str, Any]:
        """``metrics`` by key, ``samples``, ``targets``, and the findings, with ``classes`` and ``zero_shot``."""
        details = dict(self.result.details)
        if "classes" in details:
            details |= class_values(details, self.classes)
        if "zero_shot" in details:
            shot = details["zero_shot"]
            details["zero_shot"] = class_values(shot, shot["names"])
        counts = {"samples": self.result.samples, "targets": self.result.num_targets}
        return {"metrics": dict(self.result.metrics), **counts, **details}
