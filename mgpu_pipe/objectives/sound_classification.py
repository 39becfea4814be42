"""Sound classification: one of several classes for each recording.

A recording's loss does not depend on the rest of its micro-batch: a spectrogram has a fixed window; of a waveform only
its own samples reach an encoder's first norm, and only its own frames are read and averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.class_keys import SOUND_CLASSIFICATION, SOUND_TAGGING, SoundClassificationConfig
from mgpu_pipe.objectives.class_sums import ClassObjective
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.sound_inputs import SoundObjective, SpectrogramInputs, WaveInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def inputs_of(model: Any) -> WaveInputs | SpectrogramInputs:
    """The inputs of ``model``, which is prepared for them in place."""
    return WaveInputs(model) if hasattr(model.config, "conv_kernel") else SpectrogramInputs(model)


class SoundClassificationObjective(SoundObjective, ClassObjective):
    """Cross-entropy of classes under a Hugging Face model of ``AutoModelForAudioClassification``, a mean over
    recordings.

    Args:
        label_smoothing: share of each label spread over all classes, only in training.
    """

    description = SOUND_CLASSIFICATION
    num_sums = 3

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, label_smoothing)
        self._inputs = inputs_of(model)

    @classmethod
    def arguments(cls, keys: SoundClassificationConfig) -> tuple[Any, ...]:
        return (keys.label_smoothing,)

    @property
    def batch_spec(self) -> BatchSpec:
        """The fields of :class:`WaveInputs` or :class:`SpectrogramInputs`, and :meth:`_labels_field`."""
        return BatchSpec({**self._inputs.fields, "labels": self._labels_field()})

    def _labels_field(self) -> Field:
        """Classes, int64, (rows,)."""
        return Field(sequence_dim=None, padding=IGNORE_INDEX, target=True)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return self._inputs.model_inputs(batch)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise of uneven lengths. In every third step the last recording has no label."""
        generator = step_generator(seed, step)
        sounds = self._inputs.random_batch(generator, seed, step, samples)
        labels = self._random_labels(samples, generator)
        if skips_last(step, samples):
            labels[-1] = IGNORE_INDEX
        return {**sounds, "labels": labels}

    def _random_labels(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, self._classes, (samples,), generator=generator)

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One recording at a time, without padding and masks."""
        labels = batch["labels"]
        rows = [row for row in range(len(labels)) if (labels[row] != IGNORE_INDEX).all()]
        losses = [
            self._loss_alone(self._inputs.logits_alone(forward, model, batch, row)[0].float(), labels[row])
            for row in rows
        ]
        return Reference(torch.stack(losses).sum())

    def _loss_alone(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Loss of one recording, with logits (classes,)."""
        shares = logits.log_softmax(-1)
        return (self._smoothing - 1) * shares[label] - self._smoothing * shares.mean()


TOTALS = 5
"""Sums of all classes, before those of each."""
MOST_CLASSES = 1000
"""Most classes whose figures are kept one by one."""


class SoundTaggingObjective(SoundClassificationObjective):
    """Binary cross-entropy of each class under a Hugging Face model of ``AutoModelForAudioClassification``, a mean over
    classes and recordings."""

    description = SOUND_TAGGING
    num_sums = TOTALS

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._has_figures = self._classes <= MOST_CLASSES
        self.num_sums = TOTALS + 3 * self._classes * self._has_figures  # type: ignore[misc]  # as in the base class

    @classmethod
    def arguments(cls, keys: Any) -> tuple[Any, ...]:
        return ()

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
        loss = self._losses(logits, batch, 0.0).sum(dtype=torch.float64)
        totals = torch.stack([loss, exact, *(count.sum() for count in counts)])
        return torch.cat([totals, *counts]) if self._has_figures else totals

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """``classes``: for each class its ``samples``, the ``right`` among them, and the samples ``predicted`` to have
        it."""
        if not self._has_figures:
            return {}
        counts, names = np.array(sums[TOTALS : self.num_sums], np.int64), ("samples", "right", "predicted")
        by_class = counts.reshape(len(names), self._classes).tolist()
        return {"classes": dict(zip(names, by_class, strict=True))}

    def _losses(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], smoothing: float) -> torch.Tensor:
        labels = batch["labels"]
        losses = F.binary_cross_entropy_with_logits(logits, labels.clamp_min(0), reduction="none").mean(1)
        return losses.where((labels >= 0).all(1), 0.0)

    def _random_labels(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 2, (samples, self._classes), generator=generator).float()

    def _loss_alone(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return -torch.where(label > 0.5, F.logsigmoid(logits), F.logsigmoid(-logits)).mean()
