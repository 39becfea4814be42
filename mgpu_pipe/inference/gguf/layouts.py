"""Tables of the families that GGUF files can hold: names of tensors, their layout, settings.

Source: llama.cpp's ``conversion`` and ``src/models``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Layout = Literal["same", "transposed", "plus_one", "halves"]
"""``transposed``: of Conv1D; ``plus_one``: a norm that transformers adds one to; ``halves``: one tensor of the model is
two of the file, gate and up, along the dim before the last."""


@dataclass(frozen=True)
class Place:
    """Place of a model's tensor in the file.

    Attributes:
        names: of the file's tensors, without ``.weight`` or ``.bias``; several for ``halves``.
        rotary_heads: field with the number of heads whose rows llama.cpp stores in pairs of rotated values;
            transformers stores the first values of all pairs, then the second. Empty: not permuted.
    """

    names: tuple[str, ...]
    layout: Layout = "same"
    rotary_heads: str = ""


@dataclass(frozen=True)
class GgufFamily:
    """A family in GGUF files.

    Attributes:
        architecture: ``general.architecture``.
        tensors: places by the model's names; ``{}`` is the number of a block.
        fields: configuration fields by the metadata's key after the architecture.
        required: configuration values that llama.cpp takes for granted.
        is_rotary: whether positions are rotations.
    """

    architecture: str
    tensors: Mapping[str, Place]
    fields: Mapping[str, str]
    required: Mapping[str, object] = field(default_factory=dict)
    is_rotary: bool = True


def _places(names: Mapping[str, str], layout: Layout = "same") -> dict[str, Place]:
    return {name: Place((stored,), layout) for name, stored in names.items()}


_ATTENTION = {
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
}
_GATED = {
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
_DECODER_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SILU = {"hidden_act": "silu"}

_LLAMA = GgufFamily(
    "llama",
    {
        **_places({**_OUTER, **_ATTENTION, **_GATED}),
        "model.layers.{}.self_attn.q_proj": Place(("blk.{}.attn_q",), rotary_heads="num_attention_heads"),
        "model.layers.{}.self_attn.k_proj": Place(("blk.{}.attn_k",), rotary_heads="num_key_value_heads"),
    },
    _DECODER_FIELDS,
    _SILU,
)

_QWEN2 = GgufFamily("qwen2", _places({**_OUTER, **_ATTENTION, **_GATED}), _DECODER_FIELDS, _SILU)
_HEAD_NORMS = {
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
}
_GEMMA3_NORMS = {
    "model.norm": "output_norm",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
    **_HEAD_NORMS,
}

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": GgufFamily(
        "llama",
        {
            **{name: place for name, place in _LLAMA.tensors.items() if ".mlp." not in name},
            "model.layers.{}.mlp.gate": Place(("blk.{}.ffn_gate_inp",)),
            "model.layers.{}.mlp.experts.gate_up_proj": Place(("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps"), "halves"),
            "model.layers.{}.mlp.experts.down_proj": Place(("blk.{}.ffn_down_exps",)),
        },
        {**_DECODER_FIELDS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        _SILU,
    ),
    "qwen2": _QWEN2,
    "qwen3": GgufFamily(
        "qwen3", {**_QWEN2.tensors, **_places(_HEAD_NORMS)}, _DECODER_FIELDS, {**_SILU, "attention_bias": False}
    ),
    "gemma3_text": GgufFamily(
        "gemma3",
        {**_places({**_OUTER, **_ATTENTION, **_GATED}), **_places(_GEMMA3_NORMS, "plus_one")},
        {**_DECODER_FIELDS, "attention.sliding_window": "sliding_window"},
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
    "phi3": GgufFamily(
        "phi3",
        {
            **_places(_OUTER),
            "model.layers.{}.self_attn.qkv_proj": Place(("blk.{}.attn_qkv",)),
            "model.layers.{}.mlp.gate_up_proj": Place(("blk.{}.ffn_up",)),
            "model.layers.{}.mlp.down_proj": Place(("blk.{}.ffn_down",)),
        },
        _DECODER_FIELDS,
        _SILU,
    ),
    "gpt2": GgufFamily(
        "gpt2",
        {
            **_places(
                {
                    "transformer.wte": "token_embd",
                    "transformer.wpe": "position_embd",
                    "transformer.ln_f": "output_norm",
                    "lm_head": "output",
                    "transformer.h.{}.ln_1": "blk.{}.attn_norm",
                    "transformer.h.{}.ln_2": "blk.{}.ffn_norm",
                }
            ),
            **_places(
                {
                    "transformer.h.{}.attn.c_attn": "blk.{}.attn_qkv",
                    "transformer.h.{}.attn.c_proj": "blk.{}.attn_output",
                    "transformer.h.{}.mlp.c_fc": "blk.{}.ffn_up",
                    "transformer.h.{}.mlp.c_proj": "blk.{}.ffn_down",
                },
                "transposed",
            ),
        },
        {
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        is_rotary=False,
    ),
}
"""By ``model_type``; of several with the same architecture the first whose fields fit is what a file is read as."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def find_place(family: GgufFamily, name: str) -> tuple[Place, tuple[str, ...]] | None:
    """Place of the model's tensor ``name``, and the full names of the file's tensors; None where it has none."""
    number = _NUMBER.search(name)
    pattern = _NUMBER.sub("{}", name, count=1)
    stem, _, suffix = pattern.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = pattern, "weight"
    place = family.tensors.get(stem)
    if place is None:
        return None
    return place, tuple(f"{stored}.{suffix}".replace("{}", number[0] if number else "") for stored in place.names)


def to_file(place: Place, tensor: torch.Tensor, config: object) -> list[torch.Tensor]:
    """The file's tensors of a model's tensor, in the order of the place's names."""
    if place.rotary_heads:
        heads = getattr(config, place.rotary_heads)
        pairs = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return [pairs.transpose(1, 2).reshape(tensor.shape)]
    if place.layout == "halves":
        return list(tensor.chunk(2, dim=-2))
    if place.layout == "transposed" and tensor.ndim > 1:
        return [tensor.T]
    return [tensor + 1 if place.layout == "plus_one" else tensor]


def from_file(place: Place, tensors: list[torch.Tensor], config: object) -> torch.Tensor:
    """The model's tensor of the file's; the inverse of :func:`to_file`."""
    tensor = tensors[0]
    if place.rotary_heads:
        heads = getattr(config, place.rotary_heads)
        pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    if place.layout == "halves":
        return torch.cat(tensors, dim=-2)
    if place.layout == "transposed" and tensor.ndim > 1:
        return tensor.T
    return tensor - 1 if place.layout == "plus_one" else tensor
