"""Encoders of waveforms whose recordings do not depend on one another: families, and fields that they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.schema import ObjectiveConfig
from mgpu_pipe.errors import ConfigError

FAMILIES = ("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm")
"""Tested families. A recording's result does not depend on the lengths of the others in its micro-batch."""
REFUSED = {
    **dict.fromkeys(
        ("layerdrop", "encoder_layerdrop"), "whole layers would be left out by a random number of each process"
    ),
    "add_adapter": "its frames are not counted",
    "conv_pos_batch_norm": "it looks at the whole micro-batch",
}
"""Fields that must be 0 or false, with the reason."""


class WaveEncoderConfig(ObjectiveConfig):
    """Keys of an objective that trains such an encoder."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        return [
            ConfigError(
                f"model.config.{name}", fields[name], f"use model.config.{name}={type(fields[name])(0)}", reason
            )
            for name, reason in REFUSED.items()
            if fields.get(name)
        ]
