"""Keys and metrics of contrastive learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.cached_features import cached_features_errors

RANKS = (1, 5, 10)


DUAL_ENCODER = "vision-text-dual-encoder"
"""Model type of two towers of any kind (Zhai et al. 2022, "LiT", arXiv:2111.07991)."""
TOWERS = {
    "vision_config": ("clip_vision_model", "dinov2", "siglip_vision_model", "vit"),
    "text_config": ("bert", "roberta", "xlm-roberta"),
}
"""Tested tower types by part of the model."""


@dataclass
class ContrastiveConfig(ObjectiveConfig):
    name: str = "contrastive"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    max_scale: float = field(default=100.0, metadata={"at_least": 1})
    """Similarities are multiplied by a learnt number, of which no more than this counts (Radford et al. 2021)."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = []
        for part, kinds in TOWERS.items() if fields.get("model_type") == DUAL_ENCODER else ():
            kind = (fields.get(part) or {}).get("model_type")
            if kind not in kinds:
                fix = f"use one of {', '.join(kinds)}"
                errors.append(ConfigError(f"model.config.{part}.model_type", kind, fix, "no other tower was tried"))
        return errors

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        return cached_features_errors(config)


DIRECTIONS = {"image_to_text": "caption for a picture", "text_to_image": "picture for a caption"}


def measured(sums: Sequence[float]) -> dict[str, float]:
    loss, pictures, right, *hits, samples = sums
    metrics = {"val/loss": loss / samples, "val/zero_shot_accuracy": right / samples}
    recalls = iter(hits)
    for direction, queries in zip(DIRECTIONS, (round(pictures) or 1, samples), strict=True):
        metrics |= {f"val/{direction}_recall@{rank}": next(recalls) / queries for rank in RANKS}
    return metrics


DESCRIPTION = Description(
    name="contrastive",
    keys=ContrastiveConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a sample"),
        Metric("val/zero_shot_accuracy", "zero-shot accuracy", percent=True, higher_is_better=True, headline=True),
        *(
            Metric(f"val/{direction}_recall@{rank}", f"{label}, recall@{rank}", percent=True, higher_is_better=True)
            for direction, label in DIRECTIONS.items()
            for rank in RANKS
        ),
    ),
    measured=measured,
    counts="samples",
    model_class="AutoModelForZeroShotImageClassification",
    attention="own",
    samples="captioned_images",
    families=("altclip", "chinese_clip", "clip", "clipseg", "metaclip_2", "siglip", DUAL_ENCODER),
    refused_axes=("pp", "cp", "ep"),
    other_names=("clip",),
)
