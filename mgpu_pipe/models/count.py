"""Parameters of the common families from their configuration alone: exact, and without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import resolved_fields


@dataclass(frozen=True)
class ParameterCount:
    total: int
    """Every parameter, tied ones once."""
    active: int
    """Those that one token passes through: of a router's experts, the chosen ones."""


@dataclass(frozen=True)
class _Layers:
    """Parameters of all layers together, and how many of them are experts that a given token skips."""

    total: int
    idle: int = 0


def count_parameters(model: ModelConfig) -> ParameterCount | None:
    """Exact counts for llama, mistral, qwen2, qwen3, qwen3_moe, mixtral and gpt2; None for any other family."""
    fields = resolved_fields(model)
    layers_of = FAMILIES.get(fields["model_type"])
    if layers_of is None or fields.get("add_cross_attention"):
        return None
    width, vocabulary = fields["hidden_size"], fields["vocab_size"]
    layers = layers_of(fields)
    embeddings = vocabulary * width * (1 if fields["tie_word_embeddings"] else 2)
    if fields["model_type"] == "gpt2":
        embeddings += fields["max_position_embeddings"] * width
        final_norm = 2 * width
    else:
        final_norm = width
    total = embeddings + final_norm + layers.total
    return ParameterCount(total, total - layers.idle)


def _attention(fields: Mapping[str, Any], qkv_bias: bool, out_bias: bool, head_norms: bool) -> int:
    """Grouped-query attention with its two layer norms."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    head = fields.get("head_dim") or width // heads
    queries, keys = heads * head, (fields.get("num_key_value_heads") or heads) * head
    weights = width * (queries + 2 * keys) + queries * width
    biases = (queries + 2 * keys) * qkv_bias + width * out_bias
    return weights + biases + 2 * head * head_norms + 2 * width


def _gated_mlp(width: int, inner: int, bias: bool = False) -> int:
    return 3 * width * inner + (2 * inner + width) * bias


def _llama(fields: Mapping[str, Any]) -> _Layers:
    bias = bool(fields.get("attention_bias"))
    layer = _attention(fields, bias, bias, head_norms=False)
    layer += _gated_mlp(fields["hidden_size"], fields["intermediate_size"], bool(fields.get("mlp_bias")))
    return _Layers(fields["num_hidden_layers"] * layer)


def _qwen2(fields: Mapping[str, Any]) -> _Layers:
    layer = _attention(fields, qkv_bias=True, out_bias=False, head_norms=False)
    layer += _gated_mlp(fields["hidden_size"], fields["intermediate_size"])
    return _Layers(fields["num_hidden_layers"] * layer)


def _qwen3(fields: Mapping[str, Any]) -> _Layers:
    bias = bool(fields.get("attention_bias"))
    layer = _attention(fields, bias, bias, head_norms=True)
    layer += _gated_mlp(fields["hidden_size"], fields["intermediate_size"])
    return _Layers(fields["num_hidden_layers"] * layer)


def _experts(fields: Mapping[str, Any], inner: int) -> tuple[int, int]:
    """One layer's router and experts, and the part of them that a token skips."""
    width, experts = fields["hidden_size"], fields["num_experts"]
    each = _gated_mlp(width, inner)
    return experts * (width + each), (experts - fields["num_experts_per_tok"]) * each


def _mixtral(fields: Mapping[str, Any]) -> _Layers:
    sparse, idle = _experts(fields, fields["intermediate_size"])
    layers = fields["num_hidden_layers"]
    return _Layers(layers * (_attention(fields, False, False, head_norms=False) + sparse), layers * idle)


def _qwen3_moe(fields: Mapping[str, Any]) -> _Layers:
    bias, layers = bool(fields.get("attention_bias")), fields["num_hidden_layers"]
    dense_only, stride = set(fields.get("mlp_only_layers") or []), fields["decoder_sparse_step"]
    sparse_layers = sum(
        layer not in dense_only and fields["num_experts"] > 0 and (layer + 1) % stride == 0 for layer in range(layers)
    )
    sparse, idle = _experts(fields, fields["moe_intermediate_size"])
    dense = _gated_mlp(fields["hidden_size"], fields["intermediate_size"])
    attention = _attention(fields, bias, bias, head_norms=True)
    total = layers * attention + sparse_layers * sparse + (layers - sparse_layers) * dense
    return _Layers(total, sparse_layers * idle)


def _gpt2(fields: Mapping[str, Any]) -> _Layers:
    width = fields["hidden_size"]
    inner = fields.get("n_inner") or 4 * width
    layer = 4 * width + (3 * width * width + 3 * width) + (width * width + width)
    layer += (width * inner + inner) + (inner * width + width)
    return _Layers(fields["num_hidden_layers"] * layer)


FAMILIES: dict[str, Callable[[Mapping[str, Any]], _Layers]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
}
