"""Parameters of the common families from their configuration's fields alone: exact.

``fields`` are those of :func:`mgpu_pipe.models.fields.resolved_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.planner.shapes import Shape


@dataclass(frozen=True)
class ParameterCount:
    """Of a model, or of one of its layers."""

    total: int
    """Every parameter, tied ones once."""
    active: int
    """Those that one token passes through: of a router's experts, the chosen ones."""


@dataclass(frozen=True)
class _Family:
    """How a family's layers differ from llama's without biases; a name is the field that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    expert_width: str = ""
    """The field with the width of one expert; empty: no experts."""


_LLAMA = _Family("attention_bias", "attention_bias", "mlp_bias")
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family("attention_bias", "attention_bias", head_norms=True),
    "qwen3_moe": _Family("attention_bias", "attention_bias", head_norms=True, expert_width="moe_intermediate_size"),
    "mixtral": _Family(expert_width="intermediate_size"),
    "gpt2": _Family(True, True, True),
}


def counts(fields: Mapping[str, Any]) -> bool:
    """Whether a layer's parameters are known exactly."""
    return fields.get("model_type") in FAMILIES


def count_parameters(fields: Mapping[str, Any]) -> ParameterCount | None:
    """Exact counts for the families above; None for any other, and for variants with cross-attention."""
    if fields.get("model_type") not in FAMILIES or fields.get("add_cross_attention"):
        return None
    layers = [layer_parameters(fields, layer) for layer in range(fields["num_hidden_layers"])]
    ends = embedding_parameters(fields) + final_norm_parameters(fields)
    ends += 0 if fields["tie_word_embeddings"] else head_parameters(fields)
    return ParameterCount(ends + sum(layer.total for layer in layers), ends + sum(layer.active for layer in layers))


def embedding_parameters(fields: Mapping[str, Any]) -> int:
    """The tables of tokens and, in gpt2, of positions."""
    positions = fields["max_position_embeddings"] if _is_gpt2(fields) else 0
    return int((fields["vocab_size"] + positions) * fields["hidden_size"])


def head_parameters(fields: Mapping[str, Any]) -> int:
    """The output head's matrix, which may be the embedding's."""
    return int(fields["vocab_size"] * fields["hidden_size"])


def final_norm_parameters(fields: Mapping[str, Any]) -> int:
    return _norm(fields)


def layer_norm_parameters(fields: Mapping[str, Any]) -> int:
    """One layer's two norms over the model's width."""
    return 2 * _norm(fields)


def layer_parameters(fields: Mapping[str, Any], layer: int) -> ParameterCount:
    """Of one layer; in a family that is not known, 12 squared widths."""
    family = FAMILIES.get(fields.get("model_type", ""))
    if family is None:
        squared = 12 * fields["hidden_size"] ** 2
        return ParameterCount(squared, squared)
    shared = _attention(fields, family) + layer_norm_parameters(fields)
    if not _is_sparse(fields, family, layer):
        total = shared + _mlp(fields, family)
        return ParameterCount(total, total)
    experts, chosen = fields["num_experts"], fields["num_experts_per_tok"]
    router, each = experts * fields["hidden_size"], 3 * fields["hidden_size"] * fields[family.expert_width]
    return ParameterCount(shared + router + experts * each, shared + router + chosen * each)


def _is_gpt2(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("model_type") == "gpt2")


def _norm(fields: Mapping[str, Any]) -> int:
    return int(fields["hidden_size"]) * (2 if _is_gpt2(fields) else 1)


def _has(fields: Mapping[str, Any], trait: bool | str) -> bool:
    return bool(fields.get(trait)) if isinstance(trait, str) else trait


def _attention(fields: Mapping[str, Any], family: _Family) -> int:
    """Grouped-query attention; gpt2's heads divide its width, and keys are as many as queries."""
    shape = Shape.of(fields)
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    biases = (queries + 2 * keys) * _has(fields, family.qkv_bias) + shape.width * _has(fields, family.out_bias)
    return 2 * shape.width * (queries + keys) + biases + 2 * shape.head_dim * family.head_norms


def _mlp(fields: Mapping[str, Any], family: _Family) -> int:
    """Two matrices in gpt2, three where one is a gate."""
    width = int(fields["hidden_size"])
    if _is_gpt2(fields):
        inner = fields.get("n_inner") or 4 * width
        return 2 * width * inner + inner + width
    inner = fields["intermediate_size"]
    return 3 * width * inner + (2 * inner + width) * _has(fields, family.mlp_bias)


def _is_sparse(fields: Mapping[str, Any], family: _Family, layer: int) -> bool:
    """Whether a layer has experts; qwen3_moe's fields may leave some out."""
    if not family.expert_width or not fields["num_experts"]:
        return False
    dense_only = fields.get("mlp_only_layers") or []
    return layer not in dense_only and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0
