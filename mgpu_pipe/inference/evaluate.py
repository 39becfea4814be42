"""Held-out loss of a model: the exact mean over all valid tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.objectives.packed_text import forward_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_BYTES = 256 << 20
"""Rows of a micro-batch go through the model together as far as their fp32 logits fit into this."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Cross-entropy in nats a token."""
    tokens: int
    """Valid tokens it is the mean of."""
    samples: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate_step_batches(model: PreTrainedModel, step_batches: Iterable[StepBatch]) -> Evaluation:
    """Sum of the losses over all step batches' valid tokens, divided by their number; sums in float64.

    Args:
        model: whole, on one device, in evaluation mode.
    """
    device = next(model.parameters()).device
    total, tokens, samples = 0.0, 0, 0
    with torch.no_grad():
        for step_batch in step_batches:
            for batch in step_batch.micro_batches:
                for rows in _row_groups(batch, model.config.get_text_config().vocab_size):
                    inputs = {name: value.to(device) for name, value in rows.items()}
                    total += _sum_of_losses(model, inputs)
                    tokens += int((rows["labels"] != IGNORE_INDEX).sum())
            samples += step_batch.num_samples
    return Evaluation(total / tokens if tokens else math.nan, tokens, samples)


def _sum_of_losses(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> float:
    logits = model(**forward_kwargs(model, batch)).logits
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        batch["labels"].reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return float(losses.sum(dtype=torch.float64))


def _row_groups(batch: dict[str, torch.Tensor], vocabulary: int) -> Iterable[dict[str, torch.Tensor]]:
    rows, length = batch["input_ids"].shape
    together = max(1, LOGITS_BYTES // (4 * length * vocabulary))
    for start in range(0, rows, together):
        yield {name: value[start : start + together] for name, value in batch.items()}
