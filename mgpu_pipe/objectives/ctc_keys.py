"""Keys and metrics of connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.alphabet import own_alphabet
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.transcripts import RATES, TranscriptConfig, error_rates

FAMILIES = ("hubert", "unispeech", "unispeech-sat", "wav2vec2", "wavlm")
"""Tested families. A recording's result does not depend on the lengths of the others in its micro-batch."""
REFUSED = {
    "layerdrop": "whole layers would be left out by a random number of each process",
    "add_adapter": "its frames are not counted",
    "conv_pos_batch_norm": "it looks at the whole micro-batch",
}
"""Fields that must be 0 or false, with the reason."""


@dataclass
class CTCConfig(TranscriptConfig):
    name: str = "ctc"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""

    def adapter_errors(self, config: RunConfig) -> list[ConfigError]:
        if config.peft.train_also or own_alphabet(config.model) is not None:
            return []
        reason = "the head of a new alphabet would stay untrained"
        return [ConfigError("peft.train_also", [], "use peft.train_also=[lm_head.*]", reason)]

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        return [
            ConfigError(
                f"model.config.{name}", fields[name], f"use model.config.{name}={type(fields[name])(0)}", reason
            )
            for name, reason in REFUSED.items()
            if fields.get(name)
        ]


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, wrong words, words, wrong characters, characters, and the number of labels."""
    return {"val/loss": sums[0] / sums[-1], **error_rates(sums[1:-1])}


DESCRIPTION = Description(
    name="ctc",
    keys=CTCConfig,
    metrics=(Metric("val/loss", "held-out loss", "nats a character"), *RATES),
    measured=measured,
    counts="characters",
    model_class="AutoModelForCTC",
    attention="own",
    samples="speech",
    families=FAMILIES,
    refused_axes=("pp", "cp", "ep"),
    other_names=("asr",),
    alphabet=True,
)
