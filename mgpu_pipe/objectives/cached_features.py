"""Checks that a vision tower gives a picture the same features in every step."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.augment_keys import AugmentConfig
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.pixels import vision_field
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.errors import ConfigError

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


def cached_features_errors(
    config: RunConfig, has_vision_part: bool = True, families: Sequence[str] = ()
) -> list[ConfigError]:
    """Reasons why ``data.cache_features`` would change the result; none if it is off.

    Args:
        has_vision_part: whether the tower is the model's vision part, else all but a classifier's last layer.
        families: families whose features can be cached; empty for all that the objective trains.
    """
    data, model, peft = config.data, config.model, config.peft
    if not (isinstance(data, ImageConfig) and data.cache_features):
        return []
    kind = model.type or model_field(model, "model_type")
    adapter_fix = "peft.targets=[language]" if has_vision_part else "peft=none"
    adapted = peft.name != "none" and not (has_vision_part and set(peft.targets) <= {"language", "projector"})
    changed = [f"data.{key}={off}".lower() for key, off in CHANGES.items() if getattr(data, key) != off]
    usual = {key: getattr(AugmentConfig(), key) for key in AUGMENTS}
    changed += [f"data.augment.{key}={off}" for key, off in usual.items() if getattr(data.augment, key) != off]
    changed += [f"objective.{key}=0" for key in MIXES if getattr(config.objective, key, 0)]
    drops = [f"{key}=0" for key in DROPS if vision_field(model, key)]
    nested = "vision_config." if has_vision_part else ""
    candidates = [
        ("model.freeze=[vision]", "its tower learns", has_vision_part and "vision" not in model.freeze),
        (adapter_fix, "its tower gets adapters", adapted),
        ("peft.train_also=[projector]", "its tower learns", peft.name != "none" and "vision" in peft.train_also),
        (" or ".join(families), f"what the tower of {kind} sees is not kept", families and kind not in families),
        ("strategy.pp=1", "every process that trains reads them", config.strategy.pp != 1),
        *((fix, "each step changes its pictures", True) for fix in changed),
        *((f"model.config.{nested}{fix}", "its tower drops out", True) for fix in drops),
    ]
    wrong = ((f"use {fix}, or false", reason) for fix, reason, applies in candidates if applies)
    return [ConfigError("data.cache_features", True, fix, reason) for fix, reason in wrong]
