"""Table of model families; a family that needs more has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mgpu_pipe.architectures.bert import FAMILY as BERT
from mgpu_pipe.architectures.bert import styles_of
from mgpu_pipe.architectures.family import FC, LINEAR_FC, OUT_PROJ, QKV, QKV_PROJ, Family, SequencePlan, Sizes, Stages

_OWN: Mapping[str, Family] = {
    "afmoe": Family(experts="num_experts"),
    "arcee": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", "mlp_bias", gated=False)),
    "audio_spectrogram_transformer": Family(modules={"ASTAttention": {**QKV, "o_proj": "row"}, "ASTMLP": FC}),
    "bailing_hybrid": Family(experts="num_experts"),
    "biogpt": Family(packing="mask", stages=Stages(norm="layer_norm", added=("embed_positions",))),
    "bitnet": Family(stages=Stages()),
    "camembert": Family(modules=styles_of("Camembert"), stages=None),
    "clip": Family(modules={"CLIPAttention": OUT_PROJ, "CLIPMLP": FC}, reads_inside=("CLIPTextEmbeddings",)),
    "clipseg": Family(
        modules={"CLIPSegAttention": OUT_PROJ, "CLIPSegMLP": FC}, reads_inside=("CLIPSegTextEmbeddings",)
    ),
    # CodeGen: a fused projection groups queries, keys and values of four heads.
    "codegen": Family(stages=Stages("wte", "h", "ln_f", after_embedding=("drop",), tuples=True), heads_together=4),
    "cohere": Family(packing="positions"),
    "cohere2": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=1)),
    "cohere2_moe": Family(experts="num_experts"),
    # CPM-Ant: every token sees all others, whatever its configuration says.
    "cpmant": Family(causal=False),
    "deepseek_v2": Family(experts="n_routed_experts", sizes=Sizes(expert_width="moe_intermediate_size")),
    "deepseek_v3": Family(experts="n_routed_experts", sizes=Sizes(expert_width="moe_intermediate_size")),
    # DeBERTa: masks of tokens by tokens would scale its embeddings too; its encoder reads the table of distances.
    "deberta_v2": Family(
        modules={
            "DisentangledSelfAttention": dict.fromkeys(
                ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"), "column"
            ),
            "DebertaV2SelfOutput": {"dense": "row"},
            "DebertaV2Intermediate": {"dense": "column"},
            "DebertaV2Output": {"dense": "row"},
        },
        stages=None,
        token_mask=False,
        reads_weights={"DebertaV2Encoder": "rel_embeddings"},
    ),
    # DeepSeek V4: several streams of hidden states, mixed by parameters outside of the blocks.
    "deepseek_v4": Family(stages=None),
    "diffllama": Family(stages=Stages()),
    "distilbert": Family(
        modules={
            "DistilBertSelfAttention": {"q_lin": "column", "k_lin": "column", "v_lin": "column", "out_lin": "row"},
            "FFN": {"lin1": "column", "lin2": "row"},
        },
        stages=None,
    ),
    # Doge: masks have weights for each head, which tensor parallelism does not cut; routers reshape their logits
    # across the tokens of a micro-batch.
    "doge": Family(tensor=False, mixes_tokens="is_moe"),
    "electra": Family(modules=styles_of("Electra"), stages=None),
    "ernie4_5": Family(packing="positions", sizes=Sizes("use_bias", "use_bias", "use_bias")),
    "ernie4_5_moe": Family(packing="positions", experts="moe_num_experts", softmax_routers=True),
    "exaone4": Family(packing="positions", sizes=Sizes(head_norms=True)),
    "exaone_moe": Family(experts="num_experts"),
    "flex_olmo": Family(packing="positions", experts="num_experts", softmax_routers=True),
    "gemma": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias")),
    "gemma2": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=4)),
    "gemma3_text": Family(
        packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=4, head_norms=True)
    ),
    # Gemma 3n: embeddings for each layer next to the token embeddings.
    "gemma3n_text": Family(stages=None),
    # Gemma 4: its tower's layers lie inside of others that clip, which tensor parallelism does not cut right.
    "gemma4": Family(stages=None, tensor=False),
    # Gemma 4: embeddings for each layer next to the token embeddings.
    "gemma4_text": Family(stages=None),
    "glm": Family(packing="positions", sizes=Sizes("attention_bias")),
    "glm4": Family(packing="positions", sizes=Sizes("attention_bias", norms=4)),
    "glm4_moe": Family(packing="positions", experts="n_routed_experts"),
    "glm4_moe_lite": Family(experts="n_routed_experts"),
    # GLM-MoE with sparse attention: blocks pass on their chosen tokens next to hidden states.
    "glm_moe_dsa": Family(stages=None),
    "gpt_bigcode": Family(
        packing="positions", stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",))
    ),
    # GPT-Neo: does not look up its attention function by name.
    "gpt_neo": Family(
        packing="positions",
        own_attention=True,
        stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",), tuples=True),
    ),
    "gpt_neox": Family(packing="positions"),
    "gpt_neox_japanese": Family(stages=Stages("embed_in", norm="final_layer_norm", tuples=True)),
    "gptj": Family(stages=Stages("wte", "h", "ln_f", after_embedding=("drop",), tuples=True)),
    "granite": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", "mlp_bias")),
    "granitemoe": Family(
        packing="positions",
        stages=Stages(),
        experts="num_local_experts",
        softmax_routers=True,
        sizes=Sizes("attention_bias", "attention_bias", expert_width="intermediate_size"),
    ),
    "granitemoe_swa": Family(stages=Stages()),
    # Granite MoE with shared experts.
    "granitemoeshared": Family(packing="positions", stages=Stages(), experts="num_local_experts", softmax_routers=True),
    "helium": Family(packing="positions"),
    # HRM: blocks run in loops over two states.
    "hrm_text": Family(stages=None),
    "hunyuan_v1_dense": Family(packing="positions", stages=Stages()),
    "hunyuan_v1_moe": Family(packing="positions", stages=Stages(), experts="num_experts", softmax_routers=True),
    # HY V4: several streams of hidden states, mixed by parameters outside of the blocks.
    "hy_v4": Family(stages=None),
    "idefics3": Family(
        modules={"Idefics3VisionAttention": OUT_PROJ, "Idefics3VisionMLP": FC},
        width_is_heads=True,
        tower_outputs={"vision": ("last_hidden_state",)},
    ),
    # Inkling 2: a norm inside of its embedding, so that tensor parallelism does not cut it right.
    "inkling2_text": Family(tensor=False),
    "internvl": Family(
        tensor_if=({"vision_config.use_qk_norm": False},),  # its norms look at all heads together
        modules={
            "InternVLVisionAttention": {**QKV, "projection_layer": "row"},
            "InternVLVisionMLP": FC,
            "InternVLMultiModalProjector": {"linear_1": "column", "linear_2": "row"},
        },
    ),
    "jamba": Family(stages=Stages(norm="final_layernorm"), experts="num_experts", softmax_routers=True),
    "jetmoe": Family(stages=Stages()),
    "laguna": Family(experts="num_experts"),
    "llama": Family(
        packing="positions",
        sequence=SequencePlan(),
        width_is_heads=True,
        sizes=Sizes("attention_bias", "attention_bias", "mlp_bias"),
        bidirectional=True,
    ),
    "llava": Family(
        modules={"LlavaMultiModalProjector": {"linear_1": "column", "linear_2": "row"}},
        tower_outputs={"vision": ("hidden_states",)},
    ),
    # LongCat Flash: two attentions a layer; another field gives the number of layers.
    "longcat_flash": Family(stages=None),
    "mellum": Family(experts="num_local_experts", softmax_routers=True),
    "metaclip_2": Family(
        modules={"MetaClip2Attention": OUT_PROJ, "MetaClip2MLP": FC}, reads_inside=("MetaClip2TextEmbeddings",)
    ),
    "minimax": Family(experts="num_local_experts", softmax_routers=True),
    "minimax_m2": Family(packing="positions", experts="num_local_experts"),
    "ministral": Family(packing="positions"),
    "ministral3": Family(packing="positions", sizes=Sizes()),
    "mistral3": Family(
        modules={
            "PixtralAttention": {**QKV, "o_proj": "row"},
            "PixtralMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
            "Mistral3MultiModalProjector": {"linear_1": "column", "linear_2": "row"},
        }
    ),
    "modernbert": Family(
        modules={"ModernBertAttention": {"Wqkv": "qkv", "Wo": "row"}, "ModernBertMLP": {"Wi": "packed", "Wo": "row"}},
        stages=None,
    ),
    "mpnet": Family(
        modules={
            "MPNetEncoder": {"relative_attention_bias": "column"},
            "MPNetSelfAttention": {"q": "column", "k": "column", "v": "column", "o": "row"},
            "MPNetIntermediate": {"dense": "column"},
            "MPNetOutput": {"dense": "row"},
        },
        stages=None,
    ),
    "mpt": Family(packing="mask", stages=Stages("wte", "blocks", "norm_f", tuples=True)),
    # NanoChat: its norm has no parameters and is used before the blocks and after them.
    "nanochat": Family(packing="positions", stages=Stages(norm=None)),
    "nemotron": Family(packing="positions", stages=Stages()),
    "olmo": Family(packing="positions"),
    "olmo2": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", head_norms="all")),
    "olmo3": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", head_norms="all")),
    "olmoe": Family(
        packing="positions",
        stages=Stages(),
        experts="num_experts",
        softmax_routers=True,
        sizes=Sizes("attention_bias", "attention_bias", head_norms="all", expert_width="intermediate_size"),
    ),
    "opt": Family(
        packing="mask",
        stages=Stages(norm="final_layer_norm", added=("embed_positions",), path="decoder"),
        modules={"OPTAttention": OUT_PROJ, "OPTDecoderLayer": FC},
    ),
    "persimmon": Family(packing="positions", stages=Stages(norm="final_layernorm")),
    "phi": Family(packing="positions"),
    # Phi-4 multimodal: embeds images and audio.
    "phi4_multimodal": Family(stages=None),
    # Phi-MoE: no expert parallelism, for its router draws lots in training.
    "phimoe": Family(packing="positions", stages=Stages()),
    "qwen2": Family(
        packing="positions",
        sequence=SequencePlan(),
        width_is_heads=True,
        sizes=Sizes(qkv_bias=True),
        bidirectional=True,
    ),
    # Qwen2.5-VL's language model, which is given positions along four axes: the first tells conversations apart.
    "qwen2_5_vl_text": Family(packing="axes", sizes=Sizes(qkv_bias=True)),
    "qwen2_moe": Family(
        packing="positions",
        experts="num_experts",
        softmax_routers=True,
        sizes=Sizes("qkv_bias", expert_width="moe_intermediate_size"),
    ),
    "qwen3": Family(
        packing="positions",
        sequence=SequencePlan(),
        sizes=Sizes("attention_bias", "attention_bias", head_norms=True),
        bidirectional=True,
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        Family(
            modules={
                f"Qwen3_5{kind}Vision{module}": styles
                for kind in ("", "Moe")
                for module, styles in (("Attention", QKV_PROJ), ("MLP", LINEAR_FC), ("PatchMerger", LINEAR_FC))
            },
            projector=("merger",),
        ),
    ),
    "qwen3_next": Family(experts="num_experts", softmax_routers=True),
    # Qwen3-VL's language model, which is given positions along four axes: the first tells conversations apart.
    "qwen3_vl_text": Family(
        packing="axes", stages=Stages(), sizes=Sizes("attention_bias", "attention_bias", head_norms=True)
    ),
    "roberta": Family(modules=styles_of("Roberta"), stages=None),
    "seed_oss": Family(packing="positions", sizes=Sizes("attention_bias", "attention_out_bias", "mlp_bias")),
    "siglip": Family(modules={"SiglipAttention": OUT_PROJ, "SiglipMLP": FC}, reads_inside=("SiglipTextEmbeddings",)),
    "smollm3": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", "mlp_bias")),
    "smolvlm": Family(
        modules={"SmolVLMVisionAttention": OUT_PROJ, "SmolVLMVisionMLP": FC},
        width_is_heads=True,
        tower_outputs={"vision": ("last_hidden_state",)},
    ),
    "solar_open": Family(experts="n_routed_experts"),
    "stablelm": Family(packing="positions", stages=Stages()),
    "starcoder2": Family(
        packing="positions", sizes=Sizes("use_bias", "use_bias", "use_bias", norm_bias=True, gated=False)
    ),
    "vit": Family(modules={"ViTAttention": {**QKV, "o_proj": "row"}, "ViTMLP": FC}),
    "wav2vec2": Family(
        modules={
            "Wav2Vec2Attention": OUT_PROJ,
            "Wav2Vec2FeedForward": {"intermediate_dense": "column", "output_dense": "row"},
        }
    ),
    "whisper": Family(modules={"WhisperAttention": OUT_PROJ, "WhisperEncoderLayer": FC, "WhisperDecoderLayer": FC}),
    "xglm": Family(packing="mask", stages=Stages(norm="layer_norm")),
    "xlm_roberta": Family(modules=styles_of("XLMRoberta"), stages=None),
    # XLNet: every token sees all others, whatever the configuration says.
    "xlnet": Family(causal=False),
    "xmod": Family(needs={"default_language": "give the language of the text, e.g. en_XX"}),
}

_POOLED: Mapping[str, tuple[str, ...]] = {"vision": ("pooler_output",)}

FAMILIES: Mapping[str, Family] = {
    **_OWN,
    **{name: replace(_OWN[name], tower_outputs=_POOLED) for name in ("clip", "metaclip_2", "siglip")},
    **dict.fromkeys(("clip_text_model", "clip_vision_model"), _OWN["clip"]),
    **dict.fromkeys(("siglip_text_model", "siglip_vision_model"), _OWN["siglip"]),
    "mistral": _OWN["llama"],
    "gemma3": Family(modules=_OWN["siglip"].modules),
    "paligemma": Family(modules=_OWN["siglip"].modules, tower_outputs={"vision": ("last_hidden_state",)}),
    # two towers of any kinds, one for pictures and one for texts
    "vision_text_dual_encoder": Family(modules={**_OWN["vit"].modules, **_OWN["siglip"].modules, **BERT.modules}),
}
"""Families by ``model_type``, its hyphens as underscores."""
