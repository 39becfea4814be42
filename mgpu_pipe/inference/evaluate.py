"""What a model reaches on held-out data: the objective's own sums, over all that counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import Alone, Objective

LOGITS_BYTES = 256 << 20
"""Rows of a micro-batch go through the model together as far as their fp32 logits fit into this."""


@dataclass(frozen=True)
class Evaluation:
    metrics: Mapping[str, float]
    """By key, the objective's."""
    counted: int
    """What the loss is the mean over (valid tokens, samples)."""
    samples: int

    @property
    def loss(self) -> float:
        return self.metrics.get("val/loss", math.nan)


def evaluate_step_batches(objective: Objective, step_batches: Iterable[StepBatch]) -> Evaluation:
    """The objective's metrics over all step batches; sums in float64.

    Args:
        objective: of a model that is whole, on one device, in evaluation mode.
    """
    model, spec, alone = objective.model, objective.batch_spec, Alone()
    device = next(model.parameters()).device
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 1))  # type: ignore[union-attr, operator]
    total, counted, samples = torch.zeros(objective.num_sums, dtype=torch.float64), 0, 0
    with torch.no_grad():
        for step_batch in step_batches:
            parts = []
            for batch in step_batch.micro_batches:
                together = max(1, LOGITS_BYTES // (4 * max(1, spec.length(batch)) * vocabulary))
                for start in range(0, spec.rows(batch), together):
                    parts.append({name: value[start : start + together].to(device) for name, value in batch.items()})
            objective.meet(parts, len(parts), alone)
            for rows in parts:
                total += objective.evaluation_sums(rows).cpu()
                counted += spec.valid_targets(rows)
            samples += step_batch.num_samples
        last = objective.last_sums(alone)
        total += last.cpu() if isinstance(last, torch.Tensor) else last
    metrics = objective.description.measured([*total.tolist(), counted]) if counted else {}
    return Evaluation(metrics, counted, samples)
