"""Figures of an evaluation on held-out data, as lines for a terminal and as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import Description, bits_per_byte
from mgpu_pipe.report.class_tables import class_lines, class_values

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared
    from mgpu_pipe.inference.evaluate import Evaluation


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
