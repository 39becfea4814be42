"""Private names of transformers (checked against version 5)."""

from __future__ import annotations

from typing import Any

PRIVATE = (
    "transformers:PretrainedConfig._attn_implementation",
    "transformers:PreTrainedModel._can_set_attn_implementation",
    "transformers:PreTrainedModel._supports_flash_attn",
    "transformers:PreTrainedModel._can_record_outputs",
    "transformers:PreTrainedModel._keys_to_ignore_on_save",
    "transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected",
    "transformers.models.wav2vec2.modeling_wav2vec2:Wav2Vec2Model._mask_hidden_states",
    "transformers.models.whisper.modeling_whisper:WhisperModel._mask_input_features",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts._apply_gate",
)


def attention_of(config: Any) -> str | None:
    """The attention function that models of ``config`` look up."""
    name: str | None = config._attn_implementation
    return name


def set_attention(config: Any, name: str) -> None:
    """Have models of ``config`` look up this attention function from now on, unchecked."""
    config._attn_implementation = name


def looks_up_attention(model: Any) -> bool:
    """Whether a model takes its attention from transformers' AttentionInterface."""
    return bool(type(model)._can_set_attn_implementation())


def works_with_flash_attention(model: Any) -> bool:
    """Whether the layers of a model hand their attention function all that it needs beside a mask."""
    return bool(type(model)._supports_flash_attn)


def recorded_outputs(model: Any) -> dict[str, Any]:
    """By name of an output, the modules that it is recorded from."""
    return getattr(model, "_can_record_outputs", None) or {}


def keys_not_saved(model: Any) -> list[str]:
    return list(getattr(model, "_keys_to_ignore_on_save", None) or [])


def keys_not_expected(model: Any) -> list[str]:
    """Patterns of weights that a folder may have and the model does not."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])


def gated(experts: Any, inner: Any) -> Any:
    """What packed experts with a gate make of its half and the other half of their first product."""
    return experts._apply_gate(inner)


def hide_by(model: Any, hide: Any) -> None:
    """Have an encoder of waveforms hide frames and features by this function of its states, not at random."""
    model.base_model._mask_hidden_states = hide


def hide_nothing(model: Any) -> None:
    """Have an encoder of spectrograms hide nothing of them by itself."""
    model.base_model._mask_input_features = lambda features, attention_mask=None: features
