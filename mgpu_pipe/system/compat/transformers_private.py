"""Private names of transformers (checked against version 5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

PRIVATE = (
    "transformers:PretrainedConfig._attn_implementation",
    "transformers:PreTrainedModel._can_set_attn_implementation",
    "transformers:PreTrainedModel._supports_flash_attn",
    "transformers:PreTrainedModel._can_record_outputs",
    "transformers:PreTrainedModel._is_stateful",
    "transformers:PreTrainedModel._keys_to_ignore_on_save",
    "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys",
    "transformers.core_model_loading:revert_weight_conversion._weight_conversions",
    "transformers.models.wav2vec2.modeling_wav2vec2:Wav2Vec2Model._mask_hidden_states",
    "transformers.models.whisper.modeling_whisper:WhisperModel._mask_input_features",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts._apply_gate",
)


def attention_of(config: Any) -> str | None:
    """Name of the attention function of models with ``config``."""
    name: str | None = config._attn_implementation
    return name


def attention_of_parts(config: Any) -> str | dict[str, str | None] | None:
    """Name of the attention function of models with ``config``, or, where a part has another one, that of each part."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    known = {name: attention_of(part) for name, part in parts.items() if part is not None}
    name = attention_of(config)
    other = {part: attention for part, attention in known.items() if attention not in (None, name)}
    return {"": name, **other} if other and name is not None else name


def set_attention(config: Any, name: str) -> None:
    """Set the attention function of models with ``config``, unchecked."""
    config._attn_implementation = name


def looks_up_attention(model: Any) -> bool:
    """Whether a model takes its attention from transformers' AttentionInterface."""
    return bool(type(model)._can_set_attn_implementation())


def works_with_flash_attention(model: Any) -> bool:
    """Whether a model's layers pass flash attention all its arguments next to the mask."""
    return bool(type(model)._supports_flash_attn)


def recorded_outputs(model: Any) -> dict[str, Any]:
    """Modules that record each output, by its name."""
    return getattr(model, "_can_record_outputs", None) or {}


def keys_not_saved(model: Any) -> list[str]:
    return list(getattr(model, "_keys_to_ignore_on_save", None) or [])


def drop_ignored_keys(model: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Names of missing and unexpected weights, without those that transformers ignores for this model."""
    names = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(names)
    return names.missing_keys, names.unexpected_keys


def has_conversions(model: Any) -> bool:
    """Whether a model knows its changes of names and tensors from a folder."""
    return hasattr(model, "_weight_conversions")


def set_conversions(model: Any, changes: list[Any]) -> None:
    """Set the changes of names and tensors from a folder that a save reverts."""
    model._weight_conversions = changes or None


def apply_gate(experts: Any, inner: Any) -> Any:
    """Gated activation of packed experts, from both halves of their first product."""
    return experts._apply_gate(inner)


def hide_by(model: Any, hide: Any) -> None:
    """Replace the random masking of a waveform encoder by this function of its states."""
    model.base_model._mask_hidden_states = hide


def hide_nothing(model: Any) -> None:
    """Disable the masking of a spectrogram encoder."""
    model.base_model._mask_input_features = lambda features, attention_mask=None: features


def is_stateful(model: Any) -> bool:
    """Whether the cache of a ``PreTrainedModel`` is a state from which no token can be taken back."""
    return bool(model._is_stateful)
