"""Metrics of an evaluation of classes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.objective import Metric

CLASS_METRICS = (
    Metric("val/loss", "held-out loss", "nats a sample"),
    Metric("val/accuracy", "held-out accuracy", percent=True, higher_is_better=True, headline=True),
    Metric("val/top5_accuracy", "held-out top-5 accuracy", percent=True, higher_is_better=True),
)


def measure_classes(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of :class:`mgpu_pipe.objectives.class_sums.ClassSums` and the number of samples."""
    loss, right, top5 = (total / sums[-1] for total in sums[:3])
    return {"val/loss": loss, "val/accuracy": right, "val/top5_accuracy": top5}
