"""Models that see the tokens they are to predict: training them on the next token teaches them to copy. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.find import family_of

CAUSAL_VALUES: Mapping[str, Any] = {"is_decoder": True, "causal": True}
"""Fields that have to have this value (BERT and its like, XLM)."""
BIDIRECTIONAL = "use_bidirectional_attention"
OF_IMAGES = "vision"
"""A value of that field that is of images alone (Gemma 4)."""


def check_causality(fields: Mapping[str, Any]) -> None:
    """Raise where a token of the model sees those after it.

    Args:
        fields: of the model's configuration, its ``model_type`` among them.

    Raises:
        ConfigError: the family, or the field.
    """
    reason = "its tokens see those that they are to predict"
    model_type = fields.get("model_type")
    family = family_of(str(model_type))
    if not family.causal:
        raise ConfigError("model.type", model_type, "use a causal model", reason)
    for name, causal in CAUSAL_VALUES.items():
        if isinstance(fields.get(name), bool) and fields[name] is not causal:
            fix = f"use model.config.{name}={str(causal).lower()}"
            raise ConfigError(f"model.config.{name}", fields[name], fix, reason)
    mixing = family.mixes_tokens
    if fields.get(mixing):
        fix = f"use model.config.{mixing}=false"
        raise ConfigError(f"model.config.{mixing}", True, fix, "its result depends on the micro-batch's other tokens")
    if fields.get(BIDIRECTIONAL) not in (None, False, OF_IMAGES):
        raise ConfigError(f"model.config.{BIDIRECTIONAL}", fields[BIDIRECTIONAL], "leave it out", reason)
