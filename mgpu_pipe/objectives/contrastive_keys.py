"""What code without torch knows of contrastive learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.tower_features_keys import kept_features_errors

RANKS = (1, 5, 10)


TWO = "vision-text-dual-encoder"
"""Two towers of any kinds (Zhai et al. 2022, "LiT", arXiv:2111.07991)."""
TOWERS = {
    "vision_config": ("clip_vision_model", "dinov2", "siglip_vision_model", "vit"),
    "text_config": ("bert", "roberta", "xlm-roberta"),
}
"""The kinds that were tried."""


@dataclass
class ContrastiveConfig(ObjectiveConfig):
    name: str = "contrastive"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    max_scale: float = field(default=100.0, metadata={"at_least": 1})
    """Similarities are multiplied by a learnt number, of which no more than this counts (Radford et al. 2021)."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = []
        for part, kinds in TOWERS.items() if fields.get("model_type") == TWO else ():
            kind = (fields.get(part) or {}).get("model_type")
            if kind not in kinds:
                fix = f"use one of {', '.join(kinds)}"
                errors.append(ConfigError(f"model.config.{part}.model_type", kind, fix, "no other tower was tried"))
        return errors

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        return kept_features_errors(config)


DIRECTIONS = {"image_to_text": "caption for a picture", "text_to_image": "picture for a caption"}


def measured(sums: Sequence[float]) -> dict[str, float]:
    loss, accuracy, *found = (total / sums[-1] for total in sums[:-1])
    keys = [f"val/{direction}_recall@{rank}" for direction in DIRECTIONS for rank in RANKS]
    return {"val/loss": loss, "val/zero_shot_accuracy": accuracy, **dict(zip(keys, found, strict=True))}


DESCRIPTION = Description(
    name="contrastive",
    keys=ContrastiveConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a sample"),
        Metric("val/zero_shot_accuracy", "zero-shot accuracy", percent=True, higher_is_better=True, headline=True),
        *(
            Metric(f"val/{direction}_recall@{rank}", f"{told}, among {rank}", percent=True, higher_is_better=True)
            for direction, told in DIRECTIONS.items()
            for rank in RANKS
        ),
    ),
    measured=measured,
    counts="samples",
    model_class="AutoModelForZeroShotImageClassification",
    attention="own",
    samples="captioned_images",
    families=("altclip", "chinese_clip", "clip", "clipseg", "metaclip_2", "siglip", TWO),
    refused_axes=("pp", "cp", "ep"),
)
