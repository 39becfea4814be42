"""What code without torch knows of contrastive learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.tower_features_keys import kept_features_errors

RANKS = (1, 5, 10)


@dataclass
class ContrastiveConfig(ObjectiveConfig):
    name: str = "contrastive"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    max_scale: float = field(default=100.0, metadata={"at_least": 1})
    """Similarities are multiplied by a learnt number, of which no more than this counts (Radford et al. 2021)."""

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
    families=("altclip", "chinese_clip", "clip", "clipseg", "metaclip_2", "siglip"),
    refused_axes=("pp", "cp", "ep"),
)
