"""Keys and metrics of pictures with texts, and the check of cached picture features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from mgpu_pipe.architectures.find import families_in_role, families_with, family_of, sight_of
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.images.image_keys import AugmentConfig, ImageConfig
from mgpu_pipe.data.images.pixels import vision_field
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_keys import EXACT_MATCH, TOKEN_LOSS, TokenLossConfig

CHANGES = {"shift": 0, "turn": 0.0, "flip": False, "random_crop": 1.0}
"""Data keys that change training pictures, with the value that does not."""
AUGMENTS = ("crop_area", "brightness", "contrast", "saturation", "hue", "rand_ops", "erase")
"""Keys below ``data.augment`` that change training pictures unless they have their defaults."""
MIXES = ("mixup", "cutmix")
"""Keys of an objective that mix training pictures; 0 mixes none."""
DROPS = (
    *("attention_dropout", "attention_probs_dropout_prob", "drop_path_rate", "dropout", "dropout_rate"),
    *("hidden_dropout", "hidden_dropout_prob"),
)
"""Dropout fields of towers."""


@dataclass
class CachedFeaturesConfig(ObjectiveConfig):
    """Keys of an objective that can train on the stored features of a frozen tower."""

    has_vision_part: ClassVar[bool] = True
    """Whether the tower is the model's vision part, else all but a classifier's last layer."""

    def cached_families(self) -> Sequence[str]:
        """Families whose features can be stored; empty for all that the objective trains."""
        return ()

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        return []

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        """Reasons why ``data.cache_features`` would change the result; none if it is off."""
        data, model, peft = config.data, config.model, config.peft
        if not (isinstance(data, ImageConfig) and data.cache_features):
            return []
        kind, families = model.type or model_field(model, "model_type"), self.cached_families()
        adapter_fix = "peft.targets=[language]" if self.has_vision_part else "peft=none"
        adapted = peft.name != "none" and not (self.has_vision_part and set(peft.targets) <= {"language", "projector"})
        changed = [f"data.{key}={off}".lower() for key, off in CHANGES.items() if getattr(data, key) != off]
        usual = {key: getattr(AugmentConfig(), key) for key in AUGMENTS}
        changed += [f"data.augment.{key}={off}" for key, off in usual.items() if getattr(data.augment, key) != off]
        changed += [f"objective.{key}=0" for key in MIXES if getattr(self, key, 0)]
        drops = [f"{key}=0" for key in DROPS if vision_field(model, key)]
        nested = "vision_config." if self.has_vision_part else ""
        candidates = [
            ("model.freeze=[vision]", "its tower learns", self.has_vision_part and "vision" not in model.freeze),
            (adapter_fix, "its tower gets adapters", adapted),
            ("peft.train_also=[projector]", "its tower learns", peft.name != "none" and "vision" in peft.train_also),
            (" or ".join(families), f"what the tower of {kind} sees is not kept", families and kind not in families),
            ("strategy.pp=1", "every process that trains reads them", config.strategy.pp != 1),
            *((fix, "each step changes its pictures", True) for fix in changed),
            *((f"model.config.{nested}{fix}", "its tower drops out", True) for fix in drops),
        ]
        wrong = ((f"use {fix}, or false", reason) for fix, reason, applies in candidates if applies)
        return [ConfigError("data.cache_features", True, fix, reason) for fix, reason in wrong]


RANKS = (1, 5, 10)


DUAL_ENCODER = "vision-text-dual-encoder"
"""Model type of two towers of any kind (Zhai et al. 2022, "LiT", arXiv:2111.07991)."""
TRIED_TOWERS = {"vision_config": families_in_role("picture_tower"), "text_config": families_in_role("text_tower")}
"""Tested tower types by part of the model."""


@dataclass
class ContrastiveConfig(CachedFeaturesConfig):
    name: str = "contrastive"

    max_scale: float = field(default=100.0, metadata={"at_least": 1})
    """Largest value of the learnt number that multiplies similarities (Radford et al. 2021)."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        errors = []
        for part, kinds in TRIED_TOWERS.items() if fields.get("model_type") == DUAL_ENCODER else ():
            kind = (fields.get(part) or {}).get("model_type")
            if kind not in kinds:
                fix = f"use one of {', '.join(kinds)}"
                errors.append(ConfigError(f"model.config.{part}.model_type", kind, fix, "no other tower was tried"))
        return errors


DIRECTIONS = {"image_to_text": "caption for a picture", "text_to_image": "picture for a caption"}
SOUND_DIRECTIONS = {"sound_to_text": "caption for a recording", "text_to_sound": "recording for a caption"}


def measure_contrastive(sums: Sequence[float], directions: Sequence[str] = tuple(DIRECTIONS)) -> dict[str, float]:
    loss, pictures, right, *hits, samples = sums
    metrics = {"val/loss": loss / samples, "val/zero_shot_accuracy": right / samples}
    recalls = iter(hits)
    for direction, queries in zip(directions, (round(pictures) or 1, samples), strict=True):
        metrics |= {f"val/{direction}_recall@{rank}": next(recalls) / queries for rank in RANKS}
    return metrics


def _retrieval_metrics(directions: Mapping[str, str]) -> tuple[Metric, ...]:
    return (
        Metric("val/loss", "held-out loss", "nats a sample"),
        Metric("val/zero_shot_accuracy", "zero-shot accuracy", percent=True, higher_is_better=True, headline=True),
        *(
            Metric(f"val/{direction}_recall@{rank}", f"{label}, recall@{rank}", percent=True, higher_is_better=True)
            for direction, label in directions.items()
            for rank in RANKS
        ),
    )


CONTRASTIVE = Description(
    name="contrastive",
    keys=ContrastiveConfig,
    metrics=_retrieval_metrics(DIRECTIONS),
    measured=measure_contrastive,
    counts="samples",
    model_class="AutoModelForZeroShotImageClassification",
    attention="own",
    samples="captioned_images",
    families=families_in_role("two_towers"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("clip",),
)


@dataclass
class SoundContrastiveConfig(ObjectiveConfig):
    name: str = "sound_contrastive"

    max_scale: float = field(default=100.0, metadata={"at_least": 1})
    """Largest value of the two learnt numbers that multiply similarities."""

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        errors = super().data_errors(data, model)
        if model.path is None and model.type is not None:
            reason = "the statistics of its batch norm stay as they are, and a new model has none"
            fix = "give model=hf model.path=<a folder with its weights>"
            errors.append(ConfigError("model.type", model.type, fix, reason))
        return errors


SOUND_CONTRASTIVE = Description(
    name="sound_contrastive",
    keys=SoundContrastiveConfig,
    metrics=_retrieval_metrics(SOUND_DIRECTIONS),
    measured=partial(measure_contrastive, directions=tuple(SOUND_DIRECTIONS)),
    counts="samples",
    model_class="AutoModel",
    attention="own",
    samples="captioned_sounds",
    families=families_in_role("sound_and_text"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("clap",),
)


FIXED_SIZE_TOWERS = families_in_role("chat_tower")
"""Types of vision towers whose pictures all take the same number of tokens."""


@dataclass
class VisionLanguageConfig(CachedFeaturesConfig, TokenLossConfig):
    name: str = "vision_language"

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        vision = fields.get("vision_config")
        kind = vision.get("model_type") if isinstance(vision, Mapping) else None
        model_type = str(fields.get("model_type"))
        if family_of(model_type).sight is None:
            return []
        if kind in FIXED_SIZE_TOWERS or sight_of(model_type).pictures != "one_size":
            return []
        fix = f"use one of {', '.join(FIXED_SIZE_TOWERS)}"
        return [ConfigError("model.config.vision_config.model_type", kind, fix, "no other tower was tried")]

    def cached_families(self) -> Sequence[str]:
        return families_with(lambda family: family.sight is not None and family.sight.cacheable)

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        kind = model.type or model_field(model, "model_type")
        both_ways = sight_of(str(kind)).both_ways
        if data.packing != "best_fit" or not both_ways:
            return []
        reason = f"{kind} reads {both_ways} from both sides, which packed rows do not keep apart"
        return [ConfigError("data.packing", data.packing, "use none", reason)]


def measure_vision_language(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right answers, answers, and the number of tokens."""
    loss, right, answers, tokens = sums
    return {"val/loss": loss / tokens, "val/exact_match": right / answers}


VISION_LANGUAGE = Description(
    name="vision_language",
    keys=VisionLanguageConfig,
    metrics=(TOKEN_LOSS, EXACT_MATCH),
    measured=measure_vision_language,
    counts="tokens",
    model_class="AutoModelForImageTextToText",
    attention="own",
    samples="picture_chats",
    families=families_with(lambda family: family.sight is not None or family.recordings),
    refused_axes=("cp", "ep"),
)
