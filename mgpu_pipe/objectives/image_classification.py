"""Image classification: one of several classes for each picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference
from mgpu_pipe.objectives.class_sums import ClassSums
from mgpu_pipe.objectives.image_classification_keys import DESCRIPTION, ImageClassificationConfig
from mgpu_pipe.objectives.mixed_pictures import MixedSamples
from mgpu_pipe.objectives.tower_features import ClassifierFeatures, PictureObjective, caches_features
from mgpu_pipe.parallel.random_streams import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ImageClassificationObjective(PictureObjective):
    """Cross-entropy of classes under a Hugging Face model ``...ForImageClassification``, a mean over samples.

    Args:
        label_smoothing: share of each label spread over all classes, only in training.
        cache_features: ``data.cache_features``.
        mixed: whether pictures are mixed with another one.
    """

    description = DESCRIPTION
    num_sums = 3

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        label_smoothing: float = 0.0,
        cache_features: bool = False,
        mixed: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config, self._smoothing, self._mixed = cast(Any, model.config), label_smoothing, mixed
        self.features = ClassifierFeatures(model) if cache_features else None
        self._class_sums = ClassSums(int(self._config.num_labels))
        self.num_sums = self._class_sums.num_sums  # type: ignore[misc]  # the classes of this model are known only now

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(ImageClassificationConfig, config.objective)
        cached = caches_features(config)
        return cls(model, optimizer_factory, learning_rate, keys.label_smoothing, cached, keys.mixes)

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

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(self._logits(batch), batch, self._smoothing).sum(dtype=torch.float64)

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = self._logits(batch), batch["labels"]
        loss = self._losses(logits, batch, 0.0).sum(dtype=torch.float64)
        return self._class_sums.sums(loss, logits, labels)

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        return self._class_sums.findings(sums)

    def _logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast(torch.Tensor, self.model(**self.model_inputs(batch)).logits.float())

    def _losses(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], smoothing: float) -> torch.Tensor:
        def losses(labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(
                logits, labels, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing
            )

        labels = batch["labels"]
        if not self._mixed:
            return losses(labels)
        others = batch["other_labels"].where(labels != IGNORE_INDEX, IGNORE_INDEX)
        return batch["shares"] * losses(labels) + (1 - batch["shares"]) * losses(others)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random pictures. In every third step the last one has no label."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        labels = torch.randint(0, int(self._config.num_labels), (samples,), generator=generator)
        if step % 3 == 2 and samples > 2:
            labels[-1] = IGNORE_INDEX
        pictures = torch.randn(samples, *self._shape, generator=generator)
        if not self._mixed:
            return {"pixel_values": pictures, "labels": labels}
        others = torch.randint(0, int(self._config.num_labels), (samples,), generator=generator)
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


OBJECTIVE = ImageClassificationObjective
