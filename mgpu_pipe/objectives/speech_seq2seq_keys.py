"""Keys and metrics of speech recognition by an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives import wave_encoders
from mgpu_pipe.objectives.text_config import TokenLossConfig
from mgpu_pipe.objectives.transcripts import RATES, TranscriptConfig, error_rates

REFUSED = ("encoder_layerdrop", "decoder_layerdrop")
HEADS = ("encoder_attention_heads", "decoder_attention_heads")


@dataclass
class SpeechSeq2SeqConfig(TokenLossConfig, TranscriptConfig):
    name: str = "speech_seq2seq"
    """An objective of this program's (mgpu-pipe ls objective), or a name that a plug-in registers."""
    max_new_tokens: int = field(default=64, metadata={"at_least": 1})
    """Most tokens that an evaluation writes for a recording; it stops where all recordings have ended."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        reason = wave_encoders.REFUSED["layerdrop"]
        errors = [
            ConfigError(f"model.config.{name}", fields[name], f"use model.config.{name}=0.0", reason)
            for name in REFUSED
            if fields.get(name)
        ]
        encoder, decoder = (fields.get(name) for name in HEADS)
        if encoder != decoder:
            fix = f"use {encoder}, as the encoder"
            errors.append(ConfigError(f"model.config.{HEADS[1]}", decoder, fix, "both are cut alike"))
        return errors


def measured(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right tokens, wrong words, words, wrong characters, characters, and the number
    of tokens."""
    return {"val/loss": sums[0] / sums[-1], "val/accuracy": sums[1] / sums[-1], **error_rates(sums[2:-1])}


DESCRIPTION = Description(
    name="speech_seq2seq",
    keys=SpeechSeq2SeqConfig,
    metrics=(
        Metric("val/loss", "held-out loss", "nats a token"),
        Metric("val/accuracy", "held-out accuracy", "of tokens", percent=True, higher_is_better=True),
        *RATES,
    ),
    measured=measured,
    counts="tokens",
    model_class="AutoModelForSpeechSeq2Seq",
    attention="encoder_decoder",
    samples="speech",
    families=("whisper",),
    refused_axes=("pp", "cp", "ep"),
    other_names=("asr",),
)
