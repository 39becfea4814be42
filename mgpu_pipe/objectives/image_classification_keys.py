"""Keys and metrics of image classification."""

from __future__ import annotations

from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.cached_features import cached_features_errors
from mgpu_pipe.objectives.class_metrics import CLASS_METRICS, measure_classes

FAMILIES = (
    *("beit", "clip", "convnext", "convnextv2", "data2vec-vision", "dinov2", "dinov2_with_registers", "focalnet"),
    *("hiera", "ijepa", "metaclip_2", "pvt_v2", "siglip", "swin", "swinv2", "vit", "vit_msn"),
)
"""Tested families. Their classifiers use no batch statistics and match one process."""


@dataclass
class ImageClassificationConfig(ObjectiveConfig):
    name: str = "image_classification"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the label that is spread evenly over all classes while training (Szegedy et al. 2015)."""
    mixup: float = field(default=0.0, metadata={"at_least": 0})
    """Each training picture gets a share of another one, and of its label, drawn by seed and sample from the Beta
    distribution of this number twice (Zhang et al. 2018); 0 mixes none."""

    cutmix: float = field(default=0.0, metadata={"at_least": 0})
    """In each training picture a rectangle comes from another one, whose label gets the rectangle's share of the area,
    drawn by seed and sample from the Beta distribution of this number twice (Yun et al. 2019); 0 cuts none."""
    mix_probability: float = field(default=1.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the training pictures that mixup and cutmix change."""
    cutmix_probability: float = field(default=0.5, metadata={"at_least": 0, "at_most": 1})
    """With mixup and cutmix, the share of the mixed pictures that cutmix changes."""

    @property
    def mixes(self) -> bool:
        """Whether training pictures are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        return cached_features_errors(config, has_vision_part=False)


DESCRIPTION = Description(
    name="image_classification",
    keys=ImageClassificationConfig,
    metrics=CLASS_METRICS,
    measured=measure_classes,
    counts="samples",
    model_class="AutoModelForImageClassification",
    attention="own",
    samples="labelled_images",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("classification",),
)
