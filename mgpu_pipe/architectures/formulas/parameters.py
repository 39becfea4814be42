"""Parameter counts from a configuration's fields: exact if the family has sizes, else by the usual names of fields.

``fields`` are those of :func:`mgpu_pipe.models.fields.resolved_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.family import CONFIGS, Sizes
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.formulas.encoders import count_encoder, encoder_parameters
from mgpu_pipe.architectures.formulas.flops import Shape, latent_widths
from mgpu_pipe.architectures.formulas.towers import vision_parameters

CAUSAL = "AutoModelForCausalLM"


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model or a layer."""

    total: int
    """Every parameter, tied ones once."""
    active: int
    """Parameters that one token passes through: of a router's experts only the chosen ones."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields of mixtures of experts, as the families call them: the first that a configuration has counts."""
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "inner_dim")
GATES = ("silu", "swish", "swiglu", "geglu")
"""Activations of feed-forward layers with a gate, in families without :class:`Sizes`."""


def has_exact_sizes(fields: Mapping[str, Any]) -> bool:
    """Whether a layer's parameters are known exactly."""
    return _family_sizes(fields) is not None or encoder_parameters(fields) is not None


def _family_sizes(fields: Mapping[str, Any]) -> Sizes | None:
    """Traits of the language model; None where they or the model's other parts are unknown."""
    alone = not any(isinstance(fields.get(name), Mapping) for name in CONFIGS.values())
    is_known = alone or (vision_parameters(fields) is not None and not fields.get("audio_config"))
    return family_of(_language_type(fields)).sizes if is_known else None


def _language_type(fields: Mapping[str, Any]) -> str:
    text = fields.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return kind or fields.get("model_type") or ""


def sizes_of(fields: Mapping[str, Any]) -> Sizes:
    """Traits of a layer of the language model; in a family without any, those that the names of its fields suggest."""
    known = family_of(_language_type(fields)).sizes
    if known is not None:
        return known
    activation = fields.get("hidden_act") or fields.get("hidden_activation") or fields.get("activation_function")
    inner = next((name for name in INNER if fields.get(name)), "intermediate_size")
    width = next((name for name in EXPERT_WIDTHS if fields.get(name)), "")
    is_mixture = _first(fields, EXPERTS) > 1 and _first(fields, CHOSEN) > 0 and fields.get("is_moe", True)
    return Sizes(gated=activation in GATES, inner=inner, expert_width=width if is_mixture else "")


def experts_of(fields: Mapping[str, Any]) -> int:
    """Number of routed experts of a sparse layer; 0 for a dense model."""
    return _first(fields, EXPERTS) if sizes_of(fields).expert_width else 0


def experts_per_token(fields: Mapping[str, Any]) -> int:
    """Number of routed experts that compute a token; 1 for a dense model."""
    return _first(fields, CHOSEN) or 1


def dense_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of a layer if it had no experts."""
    sizes = sizes_of(fields)
    return _attention(fields, sizes) + layer_norm_parameters(fields) + _mlp(fields, sizes)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first whole number among these fields, else 0."""
    return next((value for name in names if isinstance(value := fields.get(name), int)), 0)


def count_parameters(fields: Mapping[str, Any], model_class: str = CAUSAL) -> ParameterCount | None:
    """Exact counts; None if the family has no sizes, or for variants with cross-attention.

    Args:
        model_class: transformers' ``AutoModelFor...``; a decoder is counted with its output head.
    """
    encoder = count_encoder(fields, model_class)
    if encoder is not None:
        return ParameterCount(encoder, encoder)
    if _family_sizes(fields) is None or fields.get("add_cross_attention"):
        return None
    layers = layer_counts(fields)
    ends = embedding_parameters(fields) + final_norm_parameters(fields)
    ends += 0 if fields["tie_word_embeddings"] else head_parameters(fields)
    vision = vision_parameters(fields)
    ends += vision.total if vision is not None else 0
    return ParameterCount(ends + sum(layer.total for layer in layers), ends + sum(layer.active for layer in layers))


def embedding_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of the tables of tokens and of learned positions; of an encoder, of all outside of its layers."""
    encoder = encoder_parameters(fields)
    if encoder is not None:
        return encoder.embedding
    positions = fields["max_position_embeddings"] if sizes_of(fields).learned_positions else 0
    return int((fields["vocab_size"] + positions) * fields["hidden_size"])


def head_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of the output head's matrix, which may be the embedding's."""
    return int(fields["vocab_size"] * fields["hidden_size"])


def final_norm_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of the norm after the layers; an encoder's count among its embeddings."""
    return 0 if encoder_parameters(fields) is not None else _norm(fields)


def layer_norm_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of a layer's norms over the model's width."""
    return sizes_of(fields).norms * _norm(fields)


def layer_counts(fields: Mapping[str, Any]) -> list[ParameterCount]:
    """Parameters of each layer; in a family without sizes those of a usual layer with its fields."""
    encoder = encoder_parameters(fields)
    if encoder is not None:
        return [ParameterCount(total, total) for total in encoder.layers]
    sizes = sizes_of(fields)
    around = _attention(fields, sizes) + layer_norm_parameters(fields)
    has_experts = [_is_sparse(fields, sizes, layer) for layer in range(fields["num_hidden_layers"])]
    # Layers of a kind are equal, and the planner asks for hundreds of layouts of a hundred layers.
    formulas = {False: _dense_layer, True: _sparse_layer}
    counts = {kind: formulas[kind](fields, sizes, around) for kind in set(has_experts)}
    return [counts[kind] for kind in has_experts]


def _dense_layer(fields: Mapping[str, Any], sizes: Sizes, around: int) -> ParameterCount:
    """A layer with a feed-forward layer; ``around`` counts its attention and its norms."""
    total = around + _mlp(fields, sizes)
    return ParameterCount(total, total)


def _sparse_layer(fields: Mapping[str, Any], sizes: Sizes, around: int) -> ParameterCount:
    """A layer with experts; ``around`` counts its attention and its norms."""
    width, inner, experts = int(fields["hidden_size"]), int(fields[sizes.expert_width]), experts_of(fields)
    each = 3 * width * inner + (2 * inner + width) * sizes.expert_bias
    around += experts * (width + sizes.expert_bias) + _shared_experts(fields, width)
    return ParameterCount(around + experts * each, around + experts_per_token(fields) * each)


def shared_width(fields: Mapping[str, Any]) -> int:
    """Feed-forward width of the experts that compute every token; 0 without any."""
    inner = fields.get(sizes_of(fields).expert_width)
    return _first(fields, SHARED_WIDTHS) or _first(fields, SHARED_EXPERTS) * int(inner or 0)


def _shared_experts(fields: Mapping[str, Any], width: int) -> int:
    """Parameters of the experts that compute every token."""
    shared = shared_width(fields)
    has_gate = fields.get("shared_expert_intermediate_size") is not None
    return 3 * width * shared + width * has_gate


def _norm(fields: Mapping[str, Any]) -> int:
    return int(fields["hidden_size"]) * (2 if sizes_of(fields).norm_bias else 1)


def _has(fields: Mapping[str, Any], trait: bool | str) -> bool:
    return bool(fields.get(trait)) if isinstance(trait, str) else trait


def _attention(fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Parameters of grouped-query attention; without key-value heads there are as many as queries."""
    if latent := latent_parameters(fields):
        return latent
    shape = Shape.from_fields(fields)
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    biases = (queries + 2 * keys) * _has(fields, sizes.qkv_bias) + shape.width * _has(fields, sizes.out_bias)
    norms = queries + keys if sizes.head_norms == "all" else 2 * shape.head_dim * sizes.head_norms
    return 2 * shape.width * (queries + keys) + biases + norms + shape.heads * sizes.sinks


def latent_parameters(fields: Mapping[str, Any]) -> int:
    """Parameters of a layer's latent attention; 0 for another attention."""
    widths = latent_widths(fields.get)
    return _latent_attention(fields, *widths) if widths else 0


def _latent_attention(fields: Mapping[str, Any], plain: int, rotated: int, value: int) -> int:
    """Parameters of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), with its two norms."""
    width, heads, latent = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    query, queries = fields.get("q_lora_rank"), heads * (plain + rotated)
    of_queries = width * queries if query is None else query * (width + queries + 1)
    return int(of_queries + width * (latent + rotated) + latent * (1 + heads * (plain + value)) + heads * value * width)


def _mlp(fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Parameters of two matrices, or three with a gate."""
    width, matrices = int(fields["hidden_size"]), 3 if sizes.gated else 2
    inner = fields.get(sizes.inner) or 4 * width
    return matrices * width * inner + ((matrices - 1) * inner + width) * _has(fields, sizes.mlp_bias)


def _is_sparse(fields: Mapping[str, Any], sizes: Sizes, layer: int) -> bool:
    """Whether a layer has experts; fields may exclude layers."""
    if not sizes.expert_width or not _first(fields, EXPERTS) or layer < _first(fields, DENSE_LAYERS):
        return False
    kinds = fields.get("mlp_layer_types")
    if kinds:
        return bool(kinds[layer] != "dense")
    dense_only = fields.get("mlp_only_layers") or []
    return layer not in dense_only and (layer + 1) % (fields.get("decoder_sparse_step") or 1) == 0
