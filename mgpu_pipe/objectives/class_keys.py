"""Keys and metrics of classes: of pictures, texts and recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.picture_keys import CachedFeaturesConfig
from mgpu_pipe.objectives.text_keys import TextHeadConfig, measure_accuracy, untrained_head
from mgpu_pipe.objectives.transcript_keys import WaveEncoderConfig

CLASS_METRICS = (
    Metric("val/loss", "held-out loss", "nats a sample"),
    Metric("val/accuracy", "held-out accuracy", percent=True, higher_is_better=True, headline=True),
    Metric("val/top5_accuracy", "held-out top-5 accuracy", percent=True, higher_is_better=True),
)


def measure_classes(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of :class:`mgpu_pipe.objectives.class_sums.ClassSums` and the number of samples."""
    loss, right, top5 = (total / sums[-1] for total in sums[:3])
    return {"val/loss": loss, "val/accuracy": right, "val/top5_accuracy": top5}


@dataclass
class ImageClassificationConfig(CachedFeaturesConfig):
    has_vision_part = False

    name: str = "image_classification"

    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the label that is spread evenly over all classes while training (Szegedy et al. 2015)."""
    mixup: float = field(default=0.0, metadata={"at_least": 0})
    """Each training picture gets a share of another picture and its label (Zhang et al. 2018). Seed and sample draw the
    share from the Beta distribution of this number twice; 0 mixes none."""

    cutmix: float = field(default=0.0, metadata={"at_least": 0})
    """A rectangle of each training picture comes from another picture, whose label gets the rectangle's share of the
    area (Yun et al. 2019). Seed and sample draw it from the Beta distribution of this number twice; 0 cuts none."""
    mix_probability: float = field(default=1.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the training pictures that mixup and cutmix change."""
    cutmix_probability: float = field(default=0.5, metadata={"at_least": 0, "at_most": 1})
    """With mixup and cutmix, the share of the mixed pictures that cutmix changes."""

    @property
    def mixes(self) -> bool:
        """Whether training pictures are mixed."""
        return self.mixup > 0 or self.cutmix > 0


IMAGE_CLASSIFICATION = Description(
    name="image_classification",
    keys=ImageClassificationConfig,
    metrics=CLASS_METRICS,
    measured=measure_classes,
    counts="samples",
    model_class="AutoModelForImageClassification",
    attention="own",
    samples="labelled_images",
    families=families_in_role("picture_classifier"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("classification",),
)


@dataclass
class SequenceClassificationConfig(TextHeadConfig):
    name: str = "sequence_classification"

    sample_texts: list[str] = field(default_factory=list, metadata=FREE)
    """Texts whose class is predicted after training and printed with the result."""

    def shrunk(self, tokens: int) -> Self:
        return replace(self, sample_texts=[])

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_texts, 0


SEQUENCE_CLASSIFICATION = Description(
    name="sequence_classification",
    keys=SequenceClassificationConfig,
    metrics=CLASS_METRICS[:2],
    measured=measure_accuracy,
    counts="samples",
    model_class="AutoModelForSequenceClassification",
    attention="own",
    samples="labelled_text",
    refused_axes=("pp", "cp"),
    other_names=("classification",),
)


@dataclass
class SoundHeadConfig(WaveEncoderConfig):
    """Keys of objectives whose model ends in a classifier of recordings."""

    def adapter_errors(self, model: ModelConfig, peft: PeftConfig) -> list[ConfigError]:
        return untrained_head(peft, "[projector.*,classifier.*] ([classifier.*] of AST)")


@dataclass
class SoundClassificationConfig(SoundHeadConfig):
    name: str = "sound_classification"

    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the label that is spread evenly over all classes while training (Szegedy et al. 2015)."""


SOUND_CLASSIFICATION = Description(
    name="sound_classification",
    keys=SoundClassificationConfig,
    metrics=CLASS_METRICS,
    measured=measure_classes,
    counts="samples",
    model_class="AutoModelForAudioClassification",
    attention="own",
    samples="labelled_sounds",
    families=families_in_role("sound_classifier"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("audio_classification",),
)


@dataclass
class SoundTaggingConfig(SoundHeadConfig):
    name: str = "sound_tagging"

    def model_fields(self) -> Mapping[str, Any]:
        return {"problem_type": "multi_label_classification"}


def measure_tags(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, recordings whose classes are all right, classes of recordings, right and
    predicted ones, and the number of recordings; further sums between are of single classes."""
    loss, exact, classes, right, predicted = sums[:5]
    f1 = 2 * right / max(classes + predicted, 1)
    return {"val/loss": loss / sums[-1], "val/f1": f1, "val/exact_match": exact / sums[-1]}


SOUND_TAGGING = Description(
    name="sound_tagging",
    keys=SoundTaggingConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a class"),
        Metric("val/f1", "held-out F1", percent=True, higher_is_better=True, headline=True),
        Metric("val/exact_match", "held-out exact matches", percent=True, higher_is_better=True),
    ),
    measured=measure_tags,
    counts="samples",
    model_class="AutoModelForAudioClassification",
    attention="own",
    samples="tagged_sounds",
    families=families_in_role("sound_classifier"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("audio_tagging", "multi_label"),
)
