"""Parameter counts from a configuration's fields: exact if the family has sizes.

``fields`` are those of :func:`mgpu_pipe.models.fields.resolved_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.family import Sizes
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.formulas.flops import Shape


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model or a layer."""

    total: int
    """Every parameter, tied ones once."""
    active: int
    """Parameters that one token passes through: of a router's experts only the chosen ones."""


def has_exact_sizes(fields: Mapping[str, Any]) -> bool:
    """Whether a layer's parameters are known exactly."""
    return _sizes(fields) is not None


def _sizes(fields: Mapping[str, Any]) -> Sizes | None:
    return family_of(fields.get("model_type") or "").sizes


def count_parameters(fields: Mapping[str, Any]) -> ParameterCount | None:
    """Exact counts; None if the family has no sizes, or for variants with cross-attention."""
    if not has_exact_sizes(fields) or fields.get("add_cross_attention"):
        return None
    layers = [layer_parameters(fields, layer) for layer in range(fields["num_hidden_layers"])]
    ends = embedding_parameters(fields) + final_norm_parameters(fields)
    ends += 0 if fields["tie_word_embeddings"] else head_parameters(fields)
    return ParameterCount(ends + sum(layer.total for layer in layers), ends + sum(layer.active for layer in layers))


def embedding_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of the tables of tokens and of learned positions."""
    sizes = _sizes(fields)
    positions = fields["max_position_embeddings"] if sizes and sizes.learned_positions else 0
    return int((fields["vocab_size"] + positions) * fields["hidden_size"])


def head_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of the output head's matrix, which may be the embedding's."""
    return int(fields["vocab_size"] * fields["hidden_size"])


def final_norm_parameters(fields: Mapping[str, Any]) -> int:
    return _norm(fields)


def layer_norm_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of a layer's two norms over the model's width."""
    return 2 * _norm(fields)


def layer_parameters(fields: Mapping[str, Any], layer: int) -> ParameterCount:
    """Parameters of one layer; 12 squared widths in an unknown family."""
    sizes = _sizes(fields)
    if sizes is None:
        squared = 12 * fields["hidden_size"] ** 2
        return ParameterCount(squared, squared)
    shared = _attention(fields, sizes) + layer_norm_parameters(fields)
    if not _is_sparse(fields, sizes, layer):
        total = shared + _mlp(fields, sizes)
        return ParameterCount(total, total)
    experts, chosen = fields["num_experts"], fields["num_experts_per_tok"]
    router, each = experts * fields["hidden_size"], 3 * fields["hidden_size"] * fields[sizes.expert_width]
    return ParameterCount(shared + router + experts * each, shared + router + chosen * each)


def _norm(fields: Mapping[str, Any]) -> int:
    sizes = _sizes(fields)
    return int(fields["hidden_size"]) * (2 if sizes and sizes.norm_bias else 1)


def _has(fields: Mapping[str, Any], trait: bool | str) -> bool:
    return bool(fields.get(trait)) if isinstance(trait, str) else trait


def _attention(fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Parameters of grouped-query attention; without key-value heads there are as many as queries."""
    shape = Shape.from_fields(fields)
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    biases = (queries + 2 * keys) * _has(fields, sizes.qkv_bias) + shape.width * _has(fields, sizes.out_bias)
    return 2 * shape.width * (queries + keys) + biases + 2 * shape.head_dim * sizes.head_norms


def _mlp(fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Parameters of two matrices, or three with a gate."""
    width, matrices = int(fields["hidden_size"]), 3 if sizes.gated else 2
    inner = fields[sizes.inner] or 4 * width
    return matrices * width * inner + ((matrices - 1) * inner + width) * _has(fields, sizes.mlp_bias)


def _is_sparse(fields: Mapping[str, Any], sizes: Sizes, layer: int) -> bool:
    """Whether a layer has experts; fields may exclude layers."""
    if not sizes.expert_width or not fields["num_experts"]:
        return False
    dense_only = fields.get("mlp_only_layers") or []
    return layer not in dense_only and (layer + 1) % fields.get("decoder_sparse_step", 1) == 0
