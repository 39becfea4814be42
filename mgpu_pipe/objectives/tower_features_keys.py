"""When what a vision tower makes of a picture is the same in every step. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.image.pixels import of_vision
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import ConfigError

CHANGES = {"shift": 0, "turn": 0.0, "flip": False, "random_crop": 1.0}
"""Keys of the data that change a training picture, and what leaves it as it is."""
DROPS = (
    *("attention_dropout", "attention_probs_dropout_prob", "drop_path_rate", "dropout", "dropout_rate"),
    *("hidden_dropout", "hidden_dropout_prob"),
)
"""Fields by which a tower drops at random."""


def kept_features_errors(config: RunConfig, parts: bool = True, families: Sequence[str] = ()) -> list[ConfigError]:
    """Why ``data.cache_features`` would change the result; none where it is off.

    Args:
        parts: the tower is the model's part that sees; else it is all but a classifier's last layer.
        families: whose towers' features can be kept; empty for all that the objective trains.
    """
    data, model, peft = config.data, config.model, config.peft
    if not (isinstance(data, ImageConfig) and data.cache_features):
        return []
    kind = model.type or model_field(model, "model_type")
    beside = "peft.targets=[language]" if parts else "peft=none"
    adapted = peft.name != "none" and not (parts and set(peft.targets) <= {"language", "projector"})
    changed = [f"data.{key}={off}".lower() for key, off in CHANGES.items() if getattr(data, key) != off]
    if getattr(config.objective, "mixup", 0):
        changed.append("objective.mixup=0")
    drops = [f"{key}=0" for key in DROPS if of_vision(model, key)]
    nested = "vision_config." if parts else ""
    found = [
        ("model.freeze=[vision]", "its tower learns", parts and "vision" not in model.freeze),
        (beside, "its tower gets adapters", adapted),
        ("peft.train_also=[projector]", "its tower learns", peft.name != "none" and "vision" in peft.train_also),
        (" or ".join(families), f"what the tower of {kind} sees is not kept", families and kind not in families),
        ("strategy.pp=1", "every process that trains reads them", config.strategy.pp != 1),
        *((fix, "each step changes its pictures", True) for fix in changed),
        *((f"model.config.{nested}{fix}", "its tower drops out", True) for fix in drops),
    ]
    wrong = ((f"use {fix}, or false", reason) for fix, reason, there in found if there)
    return [ConfigError("data.cache_features", True, *one) for one in wrong]
