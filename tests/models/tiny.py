"""Tiny models of many families, for the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.inference.model_folder import write_model_folder
from mgpu_pipe.inference.open import read_from

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_layers": 2,
    "d_model": 64,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "attention_heads": 4,
    "num_layers": 2,
    "attention_types": [[["global"], 2]],
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "kv_lora_rank": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "embed_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout": 0.0,
}
"""Sizes under every name that a family may give them."""


def tiny_model(model_type: str, **config: object) -> ModelConfig:
    """A model of that family with about 0.1M parameters."""
    known = config_class(model_type)
    assert known is not None
    own = set(known.annotations)
    sizes = {name: value for name, value in SMALL.items() if name in own}
    if "num_local_experts" in own:
        sizes.pop("num_experts", None)
    return ModelConfig(name=f"{model_type}_tiny", type=model_type, config={**sizes, **config})


def write_folder(model: PreTrainedModel, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder of a model without a tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    write_model_folder(model, read_from(model), out, dtype)
    return out
