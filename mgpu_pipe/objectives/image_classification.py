"""Image classification: one of several classes for each picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import ChangedSamples, SampleSet, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.class_keys import IMAGE_CLASSIFICATION, ImageClassificationConfig
from mgpu_pipe.objectives.class_sums import ClassObjective, class_losses
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.tower_features import ClassifierFeatures, PictureObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ImageClassificationObjective(PictureObjective, ClassObjective):
    """Cross-entropy of classes under a Hugging Face model ``...ForImageClassification``, a mean over samples.

    Args:
        label_smoothing: share of each label spread over all classes, only in training.
        mixed: whether pictures are mixed with another one.
        cache_features: ``data.cache_features``.
    """

    description = IMAGE_CLASSIFICATION
    num_sums = 3

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        label_smoothing: float = 0.0,
        mixed: bool = False,
        cache_features: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, label_smoothing)
        self._mixed = mixed
        self.features = ClassifierFeatures(model) if cache_features else None

    @classmethod
    def arguments(cls, keys: ImageClassificationConfig) -> tuple[Any, ...]:
        return keys.label_smoothing, keys.mixes

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        keys = cast(ImageClassificationConfig, config.objective)
        return MixedSamples(samples, keys, config.seed) if keys.mixes else samples

    @property
    def batch_spec(self) -> BatchSpec:
        """``pixel_values``, float32, (rows, channels, height, width), and ``labels``, the class, int64, (rows,); then
        :meth:`picture_number_field`. Where pictures are mixed also ``other_labels``, the other
        picture's class, and ``shares``, the share of the first picture, float32, (rows,)."""
        mixed = {
            "other_labels": Field(sequence_dim=None, padding=IGNORE_INDEX, stages="last"),
            "shares": Field(sequence_dim=None, padding=1, dtype="float32", stages="last"),
        }
        return BatchSpec(
            {
                "pixel_values": Field(sequence_dim=None, dtype="float32", shape=self._shape),
                "labels": Field(sequence_dim=None, padding=IGNORE_INDEX, target=True, stages="last"),
                **self.picture_number_field(),
                **(mixed if self._mixed else {}),
            }
        )

    @property
    def _shape(self) -> tuple[int, int, int]:
        return picture_shape(self._config)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if self.features is not None:
            self.features.set_pictures(batch)
        return {"pixel_values": batch["pixel_values"]}

    def _losses(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], smoothing: float) -> torch.Tensor:
        losses = super()._losses(logits, batch, smoothing)
        if not self._mixed:
            return losses
        others = batch["other_labels"].where(batch["labels"] != IGNORE_INDEX, IGNORE_INDEX)
        return batch["shares"] * losses + (1 - batch["shares"]) * class_losses(logits, others, smoothing)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random pictures. In every third step the last one has no label."""
        generator = step_generator(seed, step)
        labels = torch.randint(0, self._classes, (samples,), generator=generator)
        if skips_last(step, samples):
            labels[-1] = IGNORE_INDEX
        pictures = torch.randn(samples, *self._shape, generator=generator)
        if not self._mixed:
            return {"pixel_values": pictures, "labels": labels}
        others = torch.randint(0, self._classes, (samples,), generator=generator)
        shares = torch.rand(samples, generator=generator)
        return {"pixel_values": pictures, "labels": labels, "other_labels": others, "shares": shares}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One sample at a time."""
        losses = []
        for row, (picture, label) in enumerate(zip(batch["pixel_values"], batch["labels"].tolist(), strict=True)):
            if label != IGNORE_INDEX:
                shares = forward(pixel_values=picture[None]).logits[0].float().log_softmax(-1)
                right = shares[label]
                if self._mixed:
                    right = right.lerp(shares[batch["other_labels"][row]], 1 - batch["shares"][row])
                losses.append((self._smoothing - 1) * right - self._smoothing * shares.mean())
        return Reference(torch.stack(losses).sum())


MIX_SEED = 0x4D1C
"""Seed of these draws, apart from other changes of a picture."""
Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""


@dataclass(frozen=True)
class Mix:
    """Draws of one sample.

    Attributes:
        share: share of the sample's own picture and label.
        partner: index of the other sample, of all.
        box: part that comes from the other picture (CutMix); None mixes all values (mixup).
    """

    share: float
    partner: int
    box: Box | None = None


@dataclass(frozen=True)
class MixedSamples(ChangedSamples):
    """Training pictures mixed with another one each, drawn by seed and sample from all samples, so no cut of a batch
    changes it. Both pictures get the same random changes. Held-out pictures stay as they are.

    Attributes:
        keys: of the objective.
        seed: of the run.
    """

    keys: ImageClassificationConfig
    seed: int

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        read = self.read.batch(indices, numbers)
        if not len(numbers) or numbers[0] < 0:  # held out
            others = torch.full_like(read["labels"], IGNORE_INDEX)
            return {**read, "other_labels": others, "shares": torch.ones(len(indices))}
        pictures = read["pixel_values"]
        height, width = pictures.shape[2:]
        mixes = [self.draw(number, width, height) for number in numbers.tolist()]
        shares = torch.tensor([mix.share for mix in mixes], dtype=torch.float32)
        other = self.read.batch(np.array([mix.partner for mix in mixes]), numbers)
        weights = torch.tensor([1.0 if mix.box else mix.share for mix in mixes], dtype=torch.float32)
        mixed = torch.lerp(other["pixel_values"], pictures, weights[:, None, None, None])
        for row, mix in enumerate(mixes):
            if mix.box:
                left, top, right, bottom = mix.box
                mixed[row, :, top:bottom, left:right] = other["pixel_values"][row, :, top:bottom, left:right]
        return {**read, "pixel_values": mixed, "other_labels": other["labels"], "shares": shares}

    def draw(self, number: int, width: int, height: int) -> Mix:
        """Draws how the sample with this number is mixed."""
        keys, random = self.keys, random_of(self.seed ^ MIX_SEED, number)
        if keys.mix_probability < 1 and random.random() >= keys.mix_probability:
            return Mix(1.0, int(random.integers(len(self.read))))
        cuts = keys.cutmix > 0 and (not keys.mixup or random.random() < keys.cutmix_probability)
        strength = keys.cutmix if cuts else keys.mixup
        share, partner = float(random.beta(strength, strength)), int(random.integers(len(self.read)))
        if not cuts:
            return Mix(share, partner)
        across, down = int(random.integers(width)), int(random.integers(height))
        box = cut_box(width, height, share, (across, down))
        left, top, right, bottom = box
        return Mix(1 - (right - left) * (bottom - top) / (width * height), partner, box)


def cut_box(width: int, height: int, share: float, centre: tuple[int, int]) -> Box:
    """The inner part of a box around ``centre`` with ``1 - share`` of the area (Yun et al. 2019, section 3.1)."""
    (across, down), half = centre, 0.5 * (1 - share) ** 0.5
    half_width, half_height = int(half * width), int(half * height)
    left, top = max(0, across - half_width), max(0, down - half_height)
    return left, top, min(width, across + half_width), min(height, down + half_height)
