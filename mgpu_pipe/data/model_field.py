"""Model configuration fields that the data depends on, and the vocabulary size of a new tokenizer. Imports no numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.architectures.config_source import NO_DEFAULT, config_class
from mgpu_pipe.architectures.find import document_isolation, family_of, sight_of
from mgpu_pipe.config.convert import merge
from mgpu_pipe.config.data_sources import makes_tokens
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.errors import ConfigError, DataError, ModelFolderError
from mgpu_pipe.system.local_files import MAX_JSON_BYTES, parse_json, read_bytes

PADDING = "pad_token_id"
"""Field of the padding token's id. Folders of the first Llama state -1, which names no token."""


def model_field(model: ModelConfig, name: str) -> Any:
    """Field of the model's configuration, as configured or in its folder; None where neither has it."""
    file = local_folder(model.path) / "config.json" if model.path else None
    settings = merge(json_file(file) if file is not None and file.is_file() else {}, model.config)
    nested = settings.get("text_config")
    inside = nested.get(name) if isinstance(nested, Mapping) else None
    text = model.config.get("text_config")
    if model.config.get(name) is None and isinstance(text, Mapping) and text.get(name) is not None:
        return inside
    value = settings.get(name) if settings.get(name) is not None else inside
    return None if name == PADDING and isinstance(value, int) and value < 0 else value


def model_field_or_default(model: ModelConfig, name: str) -> Any:
    """:func:`model_field`, else the default of the model's class."""
    value, known = model_field(model, name), config_class(str(model.type or model_field(model, "model_type")))
    default = known.defaults.get(name) if value is None and known is not None else value
    return None if default is NO_DEFAULT else default


def model_vocab_size(model: ModelConfig) -> int | None:
    """Vocabulary size of the model, see :func:`model_field`."""
    configured = model_field(model, "vocab_size")
    if configured is None:
        return None
    if not isinstance(configured, int) or isinstance(configured, bool) or configured < 1:
        raise ConfigError("model.config.vocab_size", configured, "use a whole number of at least 1")
    return configured


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
    """Vocabulary of the tokenizer that is trained on transcripts for a new model; ConfigError without a size, or if too
    small."""
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


PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
NESTED = ("image_processor", "video_processor", "feature_extractor")
"""Parts that transformers 5 stores inside the processor's file; they override the separate files."""


def preprocessor_of(path: Path | str | None, part: Literal["image_processor", "feature_extractor"]) -> dict[str, Any]:
    """Settings of a processor's part in a model's folder, empty without; DataError for a file that cannot be read."""
    if path is None:
        return {}
    folder = local_folder(path)
    nested = _read(folder / PROCESSOR).get(part)
    return nested if isinstance(nested, dict) else _read(folder / PREPROCESSOR)


def check_extractor(model: ModelConfig, settings: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    """Raises ModelFolderError where settings of a feature extractor that are there are not ``expected``."""
    known = {name: settings[name] for name in expected if name in settings}
    apart = [f"{name}={value}, not {expected[name]}" for name, value in known.items() if value != expected[name]]
    if apart:
        what = f"{model.path}: its feature extractor does not fit the model"
        raise ModelFolderError(f"{what}: {'; '.join(apart)}; give the model's own folder")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = parse_json(read_bytes(file, MAX_JSON_BYTES), file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({type(error).__name__})") from error
    return content if isinstance(content, dict) else {}


def resolve_packing(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> Literal["best_fit", "none"]:
    """``data.packing``, auto resolved by model and objective alone, so that a resumed run packs as before."""
    if data.packing != "auto":
        return data.packing
    kind = str(model.type or model_field(model, "model_type"))
    trained = description(objective.name)
    if trained.samples == "picture_chats":
        text = {"model_type": "llama", **(model_field(model, "text_config") or {})}
        apart = not sight_of(kind).both_ways and document_isolation(text["model_type"], text) in ("positions", "axes")
    elif trained.attention == "bidirectional":
        apart = family_of(kind).token_mask
    else:
        apart = trained.attention != "causal" or document_isolation(kind, _fields(model, kind)) != "none"
    return "best_fit" if apart else "none"


def _fields(model: ModelConfig, kind: str) -> dict[str, object]:
    """Model field that decides, or its class's default."""
    name = family_of(kind).unpacked_with
    value, known = model_field(model, name) if name else None, config_class(kind)
    return {name: known.defaults.get(name) if value is None and known is not None else value}
