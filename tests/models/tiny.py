"""Tiny models of many families, for the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.inference.model_folder import write_model_folder
from mgpu_pipe.inference.open import read_from

SMALL: dict[str, object] = {
    **{"vocab_size": 128, "head_dim": 16, "kv_lora_rank": 16, "attention_types": [[["global"], 2]]},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "eos_token_id"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "bos_token_id"), 1),
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), 0.0),
    **dict.fromkeys(("embed_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "activation_dropout": 0.0,
}
"""Sizes under every name that a family may give them."""
TOWERS: dict[str, dict[str, object]] = {
    "phi4_multimodal": {
        "vision_config": {
            **{"image_size": 16, "crop_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 3, "num_attention_heads": 4},
        },
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4},
            **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
            **{"input_size": 8, "time_reduction": 2, "bias_max_distance": 16},
        },
    }
}
"""Towers of families whose default towers are large."""


def tiny_model(model_type: str, **config: object) -> ModelConfig:
    """A model of that family with about 0.1M parameters."""
    known = config_class(model_type)
    assert known is not None
    own = set(known.annotations)
    sizes = {name: value for name, value in SMALL.items() if name in own}
    if "num_local_experts" in own:
        sizes.pop("num_experts", None)
    config = {**sizes, **TOWERS.get(model_type, {}), **config}
    return ModelConfig(name=f"{model_type}_tiny", type=model_type, config=config)


def write_folder(model: PreTrainedModel, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder of a model without a tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    write_model_folder(model, read_from(model), out, dtype)
    return out
