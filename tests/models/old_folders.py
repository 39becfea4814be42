"""Folders as old versions of transformers wrote them: tensors that models no longer have, old names, old config.json.

The weights are drawn; the names, shapes and fields are those of published folders of that time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

NOISE = 0.02
Tensors = dict[str, torch.Tensor]


def write_old(kind: str, root: Path, shards: int = 1) -> Path:
    """The folder of that kind, one of :data:`KINDS`; its weights in so many files."""
    folder = root / kind
    folder.mkdir(parents=True)
    tensors, config = KINDS[kind]()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")  # without metadata, as converted files are
        return folder
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _drawn(model: nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)
    return dict(model.state_dict())


def _model(auto: str, kind: str, **fields: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    built: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **fields))
    return built


def _mask(length: int) -> torch.Tensor:
    return torch.tril(torch.ones(length, length)).view(1, 1, length, length)


BERT_FIELDS = {
    **{"attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 32},
    **{"initializer_range": 0.02, "intermediate_size": 48, "layer_norm_eps": 1e-12, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 128},
}


def _bert() -> tuple[Tensors, dict[str, Any]]:
    """bert-base-uncased: gamma and beta, the pooler and the next-sentence head beside the head of masked tokens."""
    state = _drawn(_model("AutoModelForPreTraining", "bert", **BERT_FIELDS))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
        if not name.startswith("cls.predictions.decoder")
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    more = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "pad_token_id": 0}
    return old, {**BERT_FIELDS, **more, "gradient_checkpointing": False, "position_embedding_type": "absolute"}


def _gpt2() -> tuple[Tensors, dict[str, Any]]:
    """openai-community/gpt2 and its fine-tunings: no prefix, masks in every block, n_ctx, task_specific_params."""
    fields = {
        **{"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 128},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 127, "eos_token_id": 127},
    }
    state = _drawn(_model("AutoModelForCausalLM", "gpt2", **fields))
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    for layer in range(2):
        old[f"h.{layer}.attn.bias"] = _mask(64)
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    more = {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 64, "activation_function": "gelu_new"},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
        **{"summary_type": "cls_index", "summary_use_proj": True, "gradient_checkpointing": False},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    }
    return old, {**fields, **more}


def _llama() -> tuple[Tensors, dict[str, Any]]:
    """Llama 1 and 2: rotary frequencies in every layer, rope_scaling null, torch_dtype."""
    fields = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
        **{"max_position_embeddings": 64, "vocab_size": 128, "rms_norm_eps": 1e-5, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    }
    state = _drawn(_model("AutoModelForCausalLM", "llama", **fields))
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    more = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rope_scaling": None},
        **{"pretraining_tp": 1, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True},
    }
    return state, {**fields, **more}


def _pythia() -> tuple[Tensors, dict[str, Any]]:
    """EleutherAI's Pythia: masks and frequencies in every layer, rotary_pct and rotary_emb_base, no is_decoder."""
    fields = {
        **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
        **{"max_position_embeddings": 64, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0},
        **{"layer_norm_eps": 1e-5, "use_parallel_residual": True, "tie_word_embeddings": False},
    }
    rotary = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    state = _drawn(_model("AutoModelForCausalLM", "gpt_neox", **fields, rope_parameters=rotary))
    for layer in range(2):
        attention = f"gpt_neox.layers.{layer}.attention"
        state[f"{attention}.bias"] = _mask(64).bool()
        state[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        state[f"{attention}.rotary_emb.inv_freq"] = torch.ones(1)
    more = {
        **{"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu"},
        **{"initializer_range": 0.02, "rotary_emb_base": 10000, "rotary_pct": 0.25, "torch_dtype": "float16"},
        **{"transformers_version": "4.24.0", "use_cache": True},
    }
    return state, {**fields, **more}


def _clip() -> tuple[Tensors, dict[str, Any]]:
    """openai/clip-vit-base-patch32: positions of both towers, parts written out whole, their own *_config_dict."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {**sizes, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 127, "bos_token_id": 126}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    state = _drawn(_model("AutoModel", "clip", text_config=text, vision_config=vision, projection_dim=24))
    state["text_model.embeddings.position_ids"] = torch.arange(16)[None]
    state["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    old = {"add_cross_attention": False, "is_decoder": False, "length_penalty": 1.0, "torchscript": False}
    return state, {
        **{"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 24, "initializer_factor": 1.0},
        **{"logit_scale_init_value": 2.6592, "torch_dtype": "float32", "transformers_version": None},
        "text_config": {**text, **old, "model_type": "clip_text_model", "hidden_act": "quick_gelu"},
        "vision_config": {**vision, **old, "model_type": "clip_vision_model", "hidden_act": "quick_gelu"},
        **{"text_config_dict": None, "vision_config_dict": None},
    }


def _t5() -> tuple[Tensors, dict[str, Any]]:
    """t5-small: the relative bias of the cross attention, embeddings under both tied names, task_specific_params."""
    fields = {
        **{"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 128},
        **{"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    }
    state = _drawn(_model("AutoModelForSeq2SeqLM", "t5", **fields))
    cross = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    state[cross] = torch.zeros(32, 4)
    more = {
        **{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        **{"initializer_factor": 1.0, "layer_norm_epsilon": 1e-6, "n_positions": 512, "output_past": True},
        **{"relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"prefix": "summarize: "}}},
    }
    return state, {**fields, **more}


def _wav2vec2() -> tuple[Tensors, dict[str, Any]]:
    """facebook/wav2vec2-base-960h: weight_g and weight_v of the positions' convolution, no masked_spec_embed."""
    fields = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
        **{"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32},
        **{"activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0},
        **{"hidden_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"ctc_zero_infinity": False, "ctc_loss_reduction": "sum"},
    }
    state = _drawn(_model("AutoModelForCTC", "wav2vec2", **fields))
    old = {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): tensor
        for name, tensor in state.items()
        if not name.endswith("masked_spec_embed")
    }
    more = {
        **{"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2", "gradient_checkpointing": False},
        **{"feat_extract_activation": "gelu", "feat_extract_norm": "group", "mask_time_prob": 0.05},
        **{"mask_channel_prob": 0.0, "transformers_version": "4.7.0.dev0"},
    }
    return old, {**fields, **more}


def _whisper() -> tuple[Tensors, dict[str, Any]]:
    """openai/whisper-tiny: the head left out for it is tied, what it generates with in config.json."""
    fields = {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 128},
        **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 80},
        **{"max_source_positions": 50, "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 125},
        **{"bos_token_id": 126, "eos_token_id": 127, "decoder_start_token_id": 124, "suppress_tokens": None},
        **{"begin_suppress_tokens": [5, 127]},
    }
    state = _drawn(_model("AutoModelForSpeechSeq2Seq", "whisper", **fields))
    state.pop("proj_out.weight")
    more = {
        **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True},
        **{"forced_decoder_ids": [[1, 3], [2, 4]], "max_length": 32, "num_hidden_layers": 2, "use_cache": True},
        **{"scale_embedding": False, "torch_dtype": "float32", "transformers_version": "4.27.0.dev0"},
    }
    return state, {**fields, **more}


KINDS: dict[str, Callable[[], tuple[Tensors, dict[str, Any]]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "pythia": _pythia,
    "clip": _clip,
    "t5": _t5,
    "wav2vec2": _wav2vec2,
    "whisper": _whisper,
}
