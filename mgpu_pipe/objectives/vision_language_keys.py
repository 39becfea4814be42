"""Keys and metrics of answering questions about pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.pictures import (
    PACK_ROWS,
    READ_PICTURES_WHOLE,
    READ_QUESTIONS_WHOLE,
    SEE_PARTS,
    SEE_POOLED,
    SEE_ROWS,
    SEE_TILES,
    SEE_VIDEOS,
)
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.cached_features import cached_features_errors
from mgpu_pipe.objectives.text_config import TokenLossConfig

FAMILIES_WITH_TOWER = (*SEE_VIDEOS, *SEE_PARTS, *SEE_TILES, *SEE_ROWS, *SEE_POOLED)
"""Families with their own vision tower."""
TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Types of vision towers whose pictures all take the same number of tokens."""


@dataclass
class VisionLanguageConfig(TokenLossConfig):
    name: str = "vision_language"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        vision = fields.get("vision_config")
        kind = vision.get("model_type") if isinstance(vision, Mapping) else None
        if kind in TOWERS or fields.get("model_type") in FAMILIES_WITH_TOWER:
            return []
        fix = f"use one of {', '.join(TOWERS)}"
        return [ConfigError("model.config.vision_config.model_type", kind, fix, "no other tower was tried")]

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        errors = []
        kind = config.model.type or model_field(config.model, "model_type")
        if config.data.packing == "best_fit" and kind not in PACK_ROWS:
            what = "pictures" if kind in (*READ_PICTURES_WHOLE, *SEE_POOLED) else "questions"
            reason = f"{kind} reads {what} from both sides, which packed rows do not keep apart"
            errors.append(ConfigError("data.packing", config.data.packing, "use none", reason))
        return errors + cached_features_errors(config, families=("llava",))


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right answers, answers, and the number of tokens."""
    loss, right, answers, tokens = sums
    return {"val/loss": loss / tokens, "val/exact_match": right / answers}


DESCRIPTION = Description(
    name="vision_language",
    keys=VisionLanguageConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a token"),
        Metric("val/exact_match", "held-out exact match", percent=True, higher_is_better=True, headline=True),
    ),
    measured=measured,
    counts="tokens",
    model_class="AutoModelForImageTextToText",
    attention="own",
    samples="picture_chats",
    families=("llava", *FAMILIES_WITH_TOWER, *READ_QUESTIONS_WHOLE, *READ_PICTURES_WHOLE),
    refused_axes=("cp", "ep"),
)
