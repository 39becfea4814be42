"""Vocabulary size of a tokenizer that the run trains. Imports no numpy: ``check`` needs it."""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_pipe.config.data_sources import makes_tokens
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.model_field import model_vocab_size
from mgpu_pipe.errors import ConfigError

BYTE_LEVEL_MINIMUM = 257
"""Smallest vocabulary: 256 bytes and the end-of-text token."""


def trained_vocab_size(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, special: Sequence[str] = ()
) -> int:
    """Vocabulary size of the tokenizer that ``data.tokenizer=auto`` trains for a model without a folder.

    Args:
        special: tokens of the chat template, which are never cut.

    Raises:
        ConfigError: the model has no vocabulary size, or one too small for bytes and special tokens.
    """
    size = _model_size(model)
    if makes_tokens(data.source):
        least, reason = 2, ""
    else:
        least = BYTE_LEVEL_MINIMUM + len(special)
        reason = "a byte-level tokenizer needs 256 bytes and an end-of-text token"
        reason += f", and the chat template {len(special)}" if special else ""
    if size < least:
        raise ConfigError("model.config.vocab_size", size, f"use at least {least}", reason)
    return size - objective.reserved_ids()


def transcripts_vocab_size(model: ModelConfig) -> int:
    """Vocabulary size of the tokenizer that ``data.tokenizer=auto`` trains of transcripts for a new model.

    Raises:
        ConfigError: the model has no vocabulary size, or one too small for bytes and special tokens.
    """
    size = _model_size(model)
    if size <= BYTE_LEVEL_MINIMUM:
        reason = "a byte-level tokenizer needs 256 bytes and the tokens that begin and end a transcript"
        raise ConfigError("model.config.vocab_size", size, f"use at least {BYTE_LEVEL_MINIMUM + 1}", reason)
    return size


def _model_size(model: ModelConfig) -> int:
    size = model_vocab_size(model)
    if size is None:
        reason = "data.tokenizer=auto makes a tokenizer of the model's size"
        raise ConfigError("model.config.vocab_size", None, "set it, or data.tokenizer", reason)
    return size
