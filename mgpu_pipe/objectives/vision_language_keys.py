"""What code without torch knows of answering questions about pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import Auto, ObjectiveConfig, RunConfig
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.pictures import READ_QUESTIONS_WHOLE, SEE_PARTS
from mgpu_pipe.objectives.tower_features_keys import kept_features_errors

OWN_TOWERS = ("qwen2_5_vl", "qwen3_vl", *SEE_PARTS)
"""Families whose towers are their own."""
PACKED = ("llava", *OWN_TOWERS)
"""Families whose rows may hold several conversations: those that read forward alone."""
TOWERS = ("clip_vision_model", "siglip_vision_model")
"""Kinds of a model's part that sees, whose pictures take an equal number of places each."""


@dataclass
class VisionLanguageConfig(ObjectiveConfig):
    name: str = "vision_language"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    loss_chunk_tokens: int | Auto = field(default="auto", metadata={"at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""

    def shrunk(self, tokens: int) -> Self:
        return replace(self, loss_chunk_tokens=0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5))

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        vision = fields.get("vision_config")
        kind = vision.get("model_type") if isinstance(vision, Mapping) else None
        if kind in TOWERS or fields.get("model_type") in OWN_TOWERS:
            return []
        fix = f"use one of {', '.join(TOWERS)}"
        return [ConfigError("model.config.vision_config.model_type", kind, fix, "no other tower was tried")]

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        errors = []
        kind = config.model.type or model_field(config.model, "model_type")
        if config.data.packing != "none" and kind not in PACKED:
            reason = f"{kind} reads questions from both sides, which packed rows do not keep apart"
            errors.append(ConfigError("data.packing", config.data.packing, "use none", reason))
        return errors + kept_features_errors(config, families=("llava",))


def measured(sums: Sequence[float]) -> dict[str, float]:
    """From the sums of losses, of right answers, of answers, and the number of tokens."""
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
    families=("llava", *OWN_TOWERS, *READ_QUESTIONS_WHOLE),
    refused_axes=("cp", "ep"),
)
