"""Sound tagging: several classes for each recording, or none; each class is decided by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX, Field
from mgpu_pipe.objectives.base import LearningRate
from mgpu_pipe.objectives.sound_classification import SoundClassificationObjective
from mgpu_pipe.objectives.sound_tagging_keys import DESCRIPTION

TOTALS = 5
"""Sums of all classes, before those of each."""
MOST_CLASSES = 1000
"""Most classes whose figures are kept one by one."""


class SoundTaggingObjective(SoundClassificationObjective):
    """Binary cross-entropy of each class under a Hugging Face model of ``AutoModelForAudioClassification``, a mean over
    classes and recordings."""

    description = DESCRIPTION
    num_sums = TOTALS

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._has_figures = self._classes <= MOST_CLASSES
        self.num_sums = TOTALS + 3 * self._classes * self._has_figures  # type: ignore[misc]  # as in the base class

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate)

    def _labels_field(self) -> Field:
        """Whether a class is one of the recording's, float32, (rows, classes); below 0 in a row that counts nothing."""
        return Field(sequence_dim=None, padding=IGNORE_INDEX, target=True, dtype="float32", shape=(self._classes,))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = self._logits(batch), batch["labels"]
        valid = (labels >= 0).all(1)
        is_said, is_true = logits[valid] > 0, labels[valid] > 0.5
        is_right = is_said & is_true
        counts = [kind.sum(0).double() for kind in (is_true, is_right, is_said)]
        exact = (is_said == is_true).all(1).sum().double()
        totals = torch.stack([self._loss(logits, labels, 0.0), exact, *(count.sum() for count in counts)])
        return torch.cat([totals, *counts]) if self._has_figures else totals

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """``classes``: for each class its ``samples``, the ``right`` among them, and the samples ``predicted`` to have
        it."""
        if not self._has_figures:
            return {}
        counts, names = np.array(sums[TOTALS : self.num_sums], np.int64), ("samples", "right", "predicted")
        by_class = counts.reshape(len(names), self._classes).tolist()
        return {"classes": dict(zip(names, by_class, strict=True))}

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp_min(0), reduction="none").mean(1)
        return losses.where((labels >= 0).all(1), 0.0).sum(dtype=torch.float64)

    def _random_labels(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 2, (samples, self._classes), generator=generator).float()

    def _loss_alone(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return -torch.where(label > 0.5, F.logsigmoid(logits), F.logsigmoid(-logits)).mean()


OBJECTIVE = SoundTaggingObjective
