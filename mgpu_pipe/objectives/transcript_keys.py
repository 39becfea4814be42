"""Keys and metrics of speech recognition. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.objective import Description, Metric
from mgpu_pipe.config.plugins import import_package
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.alphabet import own_alphabet
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.text_keys import TOKEN_ACCURACY, TOKEN_LOSS, TokenLossConfig

REFUSED_FIELDS = {
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
            for name, reason in REFUSED_FIELDS.items()
            if fields.get(name)
        ]


_FIRST_CHARACTER = 0x4E00
"""Start of a Unicode block of 20,000 letters without a space."""
RATES = (
    Metric("val/word_error_rate", "held-out word error rate", percent=True, headline=True),
    Metric("val/character_error_rate", "held-out character error rate", percent=True),
)


@dataclass
class TranscriptConfig(ObjectiveConfig):
    """Keys of an objective that measures word errors."""

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        try:
            jiwer(self.name)
        except ConfigError as error:
            return [error]
        return []


def jiwer(objective: str = "ctc") -> Any:
    """The package jiwer; ConfigError if ``objective`` needs it and it is not installed."""
    return import_package("jiwer", "jiwer, which counts wrong words,", "audio", "objective.name", objective)


def transcribe(labels: Iterable[int], between_words: int, blank: int | None = None) -> str:
    """Text of labels. With ``blank`` they are labels of frames: repeats are merged and blanks dropped."""
    if blank is not None:
        labels = [label for label, _ in groupby(labels) if label != blank]
    text = "".join(" " if label == between_words else chr(_FIRST_CHARACTER + label) for label in labels)
    return " ".join(text.split())


def count_errors(pairs: Sequence[tuple[str, str]]) -> tuple[int, int, int, int]:
    """Wrong words, words, wrong characters and characters of pairs (reference, transcript)."""
    if not pairs:
        return 0, 0, 0, 0
    said, wrote = (list(texts) for texts in zip(*pairs, strict=True))
    counts = []
    for result in (jiwer().process_words(said, wrote), jiwer().process_characters(said, wrote)):
        wrong = result.substitutions + result.deletions + result.insertions
        counts += [wrong, result.hits + result.substitutions + result.deletions]
    return counts[0], counts[1], counts[2], counts[3]


def error_rates(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of :func:`count_errors`."""
    wrong_words, words, wrong_characters, characters = sums
    return {"val/word_error_rate": wrong_words / words, "val/character_error_rate": wrong_characters / characters}


@dataclass
class CTCConfig(WaveEncoderConfig, TranscriptConfig):
    name: str = "ctc"

    def adapter_errors(self, model: ModelConfig, peft: PeftConfig) -> list[ConfigError]:
        if peft.train_also or own_alphabet(model) is not None:
            return []
        reason = "the head of a new alphabet would stay untrained"
        return [ConfigError("peft.train_also", [], "use peft.train_also=[lm_head.*]", reason)]


def measure_ctc(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, wrong words, words, wrong characters, characters, and the number of labels."""
    return {"val/loss": sums[0] / sums[-1], **error_rates(sums[1:-1])}


CTC = Description(
    name="ctc",
    keys=CTCConfig,
    metrics=(Metric("val/loss", "held-out loss", "nats a character"), *RATES),
    measured=measure_ctc,
    counts="characters",
    model_class="AutoModelForCTC",
    attention="own",
    samples="speech",
    families=families_in_role("waveform_encoder"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("asr",),
    alphabet=True,
)


LAYER_DROPS = ("encoder_layerdrop", "decoder_layerdrop")
HEADS = ("encoder_attention_heads", "decoder_attention_heads")


@dataclass
class SpeechSeq2SeqConfig(TokenLossConfig, TranscriptConfig):
    name: str = "speech_seq2seq"
    max_new_tokens: int = field(default=64, metadata={"at_least": 1})
    """Most tokens that an evaluation writes for a recording; it stops where all recordings have ended."""

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        reason = REFUSED_FIELDS["layerdrop"]
        errors = [
            ConfigError(f"model.config.{name}", fields[name], f"use model.config.{name}=0.0", reason)
            for name in LAYER_DROPS
            if fields.get(name)
        ]
        encoder, decoder = (fields.get(name) for name in HEADS)
        if encoder != decoder:
            fix = f"use {encoder}, as the encoder"
            errors.append(ConfigError(f"model.config.{HEADS[1]}", decoder, fix, "both are cut alike"))
        return errors


def measure_speech_seq2seq(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of losses, right tokens, wrong words, words, wrong characters, characters, and the number
    of tokens."""
    return {"val/loss": sums[0] / sums[-1], "val/accuracy": sums[1] / sums[-1], **error_rates(sums[2:-1])}


SPEECH_SEQ2SEQ = Description(
    name="speech_seq2seq",
    keys=SpeechSeq2SeqConfig,
    metrics=(TOKEN_LOSS, TOKEN_ACCURACY, *RATES),
    measured=measure_speech_seq2seq,
    counts="tokens",
    model_class="AutoModelForSpeechSeq2Seq",
    attention="encoder_decoder",
    samples="speech",
    families=families_in_role("transcriber"),
    refused_axes=("pp", "cp", "ep"),
    other_names=("asr",),
)
