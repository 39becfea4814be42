"""Table of the families of text models, by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_pipe.architectures.family import FC, OUT_PROJ, QKV, Family, Role, SequencePlan, Sizes, Stages, Style

ENCODER: tuple[Role, ...] = ("text_encoder", "text_vectors")
"""Roles of every tested encoder of texts."""


def styles_of(prefix: str) -> dict[str, Mapping[str, Style]]:
    """Styles of BERT's modules, whose classes begin with ``prefix``."""
    return {
        f"{prefix}SelfAttention": {"query": "column", "key": "column", "value": "column"},
        f"{prefix}SelfOutput": {"dense": "row"},
        f"{prefix}Intermediate": {"dense": "column"},
        f"{prefix}Output": {"dense": "row"},
    }


T5_ATTENTION: Mapping[str, Style] = {**dict.fromkeys(("q", "k", "v", "relative_attention_bias"), "column"), "o": "row"}
"""Styles of T5's attention."""
_OWN: Mapping[str, Family] = {
    "afmoe": Family(experts="num_experts"),
    "arcee": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", "mlp_bias", gated=False)),
    "bailing_hybrid": Family(experts="num_experts"),
    "bert": Family(
        modules=styles_of("Bert"), stages=None, roles=(*ENCODER, "text_tower", "token_matcher"), causal_if="is_decoder"
    ),
    "biogpt": Family(packing="mask", stages=Stages(norm="layer_norm", added=("embed_positions",))),
    "bitnet": Family(stages=Stages()),
    "bloom": Family(
        stages=Stages("word_embeddings", "h", "ln_f", after_embedding=("word_embeddings_layernorm",), tuples=True),
        tensor_if=({"slow_but_exact": False},),
        modules={
            "BloomAttention": {"query_key_value": "grouped", "dense": "row", "alibi": "per_head"},
            "BloomMLP": {"dense_h_to_4h": "column", "dense_4h_to_h": "row"},
        },
    ),
    "camembert": Family(modules=styles_of("Camembert"), stages=None, roles=ENCODER, causal_if="is_decoder"),
    # CodeGen: a fused projection groups queries, keys and values of four heads.
    "codegen": Family(stages=Stages("wte", "h", "ln_f", after_embedding=("drop",), tuples=True), heads_together=4),
    "cohere": Family(packing="positions"),
    "cohere2": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=1)),
    "cohere2_moe": Family(experts="num_experts"),
    # CPM-Ant: every token sees all others, whatever its configuration says.
    "cpmant": Family(causal=False),
    # DeBERTa: masks of tokens by tokens would scale its embeddings too; its encoder reads the table of distances.
    "deberta-v2": Family(
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
        roles=ENCODER,
    ),
    "deepseek_v2": Family(experts="n_routed_experts", sizes=Sizes(expert_width="moe_intermediate_size")),
    "deepseek_v3": Family(experts="n_routed_experts", sizes=Sizes(expert_width="moe_intermediate_size")),
    # DeepSeek V4: several streams of hidden states, mixed by parameters outside of the blocks.
    "deepseek_v4": Family(stages=None),
    "diffllama": Family(stages=Stages()),
    "distilbert": Family(
        modules={
            "DistilBertSelfAttention": {"q_lin": "column", "k_lin": "column", "v_lin": "column", "out_lin": "row"},
            "FFN": {"lin1": "column", "lin2": "row"},
        },
        stages=None,
        roles=ENCODER,
    ),
    # Doge: masks have weights for each head, which tensor parallelism does not cut; routers reshape their logits
    # across the tokens of a micro-batch.
    "doge": Family(tensor=False, mixes_tokens="is_moe"),
    "electra": Family(
        modules=styles_of("Electra"), stages=None, roles=(*ENCODER, "token_matcher"), causal_if="is_decoder"
    ),
    "ernie4_5": Family(packing="positions", sizes=Sizes("use_bias", "use_bias", "use_bias")),
    "ernie4_5_moe": Family(packing="positions", experts="moe_num_experts", softmax_routers=True),
    "exaone4": Family(packing="positions", sizes=Sizes(head_norms=True)),
    "exaone_moe": Family(experts="num_experts"),
    # Falcon: counts the positions of ALiBi's biases by a mask of another shape than the block-diagonal one. Tensor
    # parallelism cuts neither the one key-value head of its first models, fused with all queries in a matrix, nor the
    # mask with ALiBi's biases.
    "falcon": Family(
        packing="mask",
        unpacked_with="alibi",
        stages=Stages("word_embeddings", "h", "ln_f", tuples=True),
        tensor_if=({"new_decoder_architecture": True, "alibi": False}, {"multi_query": False, "alibi": False}),
        modules={
            "FalconAttention": {"query_key_value": "grouped", "dense": "row"},
            "FalconMLP": {"dense_h_to_4h": "column", "dense_4h_to_h": "row"},
        },
    ),
    "flex_olmo": Family(packing="positions", experts="num_experts", softmax_routers=True),
    "gemma": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias")),
    "gemma2": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=4)),
    "gemma3_text": Family(
        packing="positions", sizes=Sizes("attention_bias", "attention_bias", norms=4, head_norms=True)
    ),
    # Gemma 3n: embeddings for each layer next to the token embeddings.
    "gemma3n_text": Family(stages=None),
    # Gemma 4: embeddings for each layer next to the token embeddings.
    "gemma4_text": Family(stages=None),
    "glm": Family(packing="positions", sizes=Sizes("attention_bias")),
    "glm4": Family(packing="positions", sizes=Sizes("attention_bias", norms=4)),
    "glm4_moe": Family(packing="positions", experts="n_routed_experts"),
    "glm4_moe_lite": Family(experts="n_routed_experts"),
    # GLM-MoE with sparse attention: blocks pass on their chosen tokens next to hidden states.
    "glm_moe_dsa": Family(stages=None),
    "gpt2": Family(
        packing="positions",
        stages=Stages("wte", "h", "ln_f", added=("wpe",), after_embedding=("drop",)),
        modules={
            "GPT2Attention": {"c_attn": "packed", "q_attn": "column", "c_proj": "row"},
            "GPT2MLP": {"c_fc": "column", "c_proj": "row"},
        },
        sequence=SequencePlan("h", "ln_f", ("wpe",)),
        width_is_heads=True,
        sizes=Sizes(True, True, True, norm_bias=True, learned_positions=True, gated=False, inner="n_inner"),
    ),
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
    # GPT-OSS: its experts interleave gate and up projections in one matrix, so a range holds pairs.
    "gpt_oss": Family(
        modules={
            "GptOssAttention": {**QKV, "o_proj": "row", "sinks": "column"},
            "GptOssMLP": {"experts": "experts"},
            "GptOssExperts": {
                "gate_up_proj": "column",
                "gate_up_proj_bias": "column",
                "down_proj": "row",
                "down_proj_bias": "once",
            },
        },
        experts="num_local_experts",
        softmax_routers=True,
        sizes=Sizes("attention_bias", "attention_bias", sinks=True, expert_bias=True, expert_width="intermediate_size"),
    ),
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
    # Inkling 2: a norm inside of its embedding, so that tensor parallelism does not cut it right.
    "inkling2_text": Family(tensor=False),
    "jamba": Family(stages=Stages(norm="final_layernorm"), experts="num_experts", softmax_routers=True),
    "jetmoe": Family(stages=Stages()),
    "laguna": Family(experts="num_experts"),
    "llama": Family(
        packing="positions",
        sequence=SequencePlan(),
        width_is_heads=True,
        sizes=Sizes("attention_bias", "attention_bias", "mlp_bias"),
        bidirectional=True,
        roles=("text_vectors",),
    ),
    # Llama 4: its experts take every token, scaled by its router's score. Masks of chunks and scales of queries count a
    # row's tokens, not a document's.
    "llama4_text": Family(
        stages=Stages(path="model"),
        modules={
            "Llama4TextAttention": {**QKV, "o_proj": "row"},
            "Llama4TextMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
            "Llama4TextMoe": {"experts": "experts"},
            "Llama4TextExperts": {"gate_up_proj": "packed", "down_proj": "row"},
        },
    ),
    # LongCat Flash: two attentions a layer; another field gives the number of layers.
    "longcat_flash": Family(stages=None),
    "mellum": Family(experts="num_local_experts", softmax_routers=True),
    "minimax": Family(experts="num_local_experts", softmax_routers=True),
    "minimax_m2": Family(packing="positions", experts="num_local_experts"),
    "ministral": Family(packing="positions"),
    "ministral3": Family(packing="positions", sizes=Sizes()),
    "mixtral": Family(
        packing="positions",
        sequence=SequencePlan(),
        experts="num_local_experts",
        softmax_routers=True,
        width_is_heads=True,
        sizes=Sizes(expert_width="intermediate_size"),
    ),
    "modernbert": Family(
        modules={"ModernBertAttention": {"Wqkv": "qkv", "Wo": "row"}, "ModernBertMLP": {"Wi": "packed", "Wo": "row"}},
        stages=None,
        roles=ENCODER,
    ),
    "mpnet": Family(
        modules={
            "MPNetEncoder": {"relative_attention_bias": "column"},
            "MPNetSelfAttention": {"q": "column", "k": "column", "v": "column", "o": "row"},
            "MPNetIntermediate": {"dense": "column"},
            "MPNetOutput": {"dense": "row"},
        },
        stages=None,
        roles=ENCODER,
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
    "phi3": Family(
        packing="positions",
        modules={
            "Phi3Attention": {"qkv_proj": "qkv", "o_proj": "row"},
            "Phi3MLP": {"gate_up_proj": "packed", "down_proj": "row"},
        },
        sizes=Sizes(),
    ),
    # Phi-4 multimodal: embeds images and audio.
    # Phi-MoE: no expert parallelism, for its router draws lots in training.
    "phimoe": Family(packing="positions", stages=Stages()),
    "qwen2": Family(
        packing="positions",
        sequence=SequencePlan(),
        width_is_heads=True,
        sizes=Sizes(qkv_bias=True),
        bidirectional=True,
        roles=("text_vectors",),
    ),
    # Qwen2.5-VL's language model, which takes positions along four axes. The first separates conversations.
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
        roles=("text_vectors",),
    ),
    "qwen3_moe": Family(
        packing="positions",
        sequence=SequencePlan(),
        experts="num_experts",
        softmax_routers=True,
        sizes=Sizes("attention_bias", "attention_bias", head_norms=True, expert_width="moe_intermediate_size"),
    ),
    "qwen3_next": Family(experts="num_experts", softmax_routers=True),
    # Qwen3-VL's language model, which takes positions along four axes. The first separates conversations.
    "qwen3_vl_text": Family(
        packing="axes", stages=Stages(), sizes=Sizes("attention_bias", "attention_bias", head_norms=True)
    ),
    **dict.fromkeys(
        ("qwen3_omni_moe_text", "qwen3_vl_moe_text"),
        Family(
            packing="axes",
            stages=Stages(),
            sizes=Sizes("attention_bias", "attention_bias", head_norms=True, expert_width="moe_intermediate_size"),
        ),
    ),
    "roberta": Family(
        modules=styles_of("Roberta"), stages=None, roles=(*ENCODER, "text_tower"), causal_if="is_decoder"
    ),
    "seed_oss": Family(packing="positions", sizes=Sizes("attention_bias", "attention_out_bias", "mlp_bias")),
    "smollm3": Family(packing="positions", sizes=Sizes("attention_bias", "attention_bias", "mlp_bias")),
    "solar_open": Family(experts="n_routed_experts"),
    "stablelm": Family(packing="positions", stages=Stages()),
    "starcoder2": Family(
        packing="positions", sizes=Sizes("use_bias", "use_bias", "use_bias", norm_bias=True, gated=False)
    ),
    # T5: each stack's first block has the biases of relative positions, a column per head.
    "t5": Family(
        stages=None,
        needs={"pad_token_id": "give the token that the decoder begins with"},
        modules={
            "T5Attention": T5_ATTENTION,
            "T5DenseActDense": {"wi": "column", "wo": "row"},
            "T5DenseGatedActDense": {"wi_0": "column", "wi_1": "column", "wo": "row"},
        },
        roles=("text_to_text",),
    ),
    "xglm": Family(packing="mask", stages=Stages(norm="layer_norm")),
    "xlm-roberta": Family(
        modules=styles_of("XLMRoberta"), stages=None, roles=(*ENCODER, "text_tower"), causal_if="is_decoder"
    ),
    # XLNet: every token sees all others, whatever the configuration says.
    "xlnet": Family(causal=False, classifies=False),
    "xmod": Family(needs={"default_language": "give the language of the text, e.g. en_XX"}, causal_if="is_decoder"),
}

TEXT_FAMILIES: Mapping[str, Family] = {
    **_OWN,
    "mistral": _OWN["llama"],
    **dict.fromkeys(
        ("bert-generation", "big_bird", "data2vec-text", "ernie", "megatron-bert", "rembert", "roberta-prelayernorm")
        + ("roc_bert", "roformer", "xlm-roberta-xl"),
        Family(causal_if="is_decoder"),
    ),
    "reformer": Family(causal_if="is_decoder", classifies=False),
    "xlm": Family(causal_if="causal", classifies=False),
    **dict.fromkeys(
        ("canine", "flaubert", "fnet", "funnel", "layoutlmv2", "layoutlmv3", "lilt", "perceiver"),
        Family(classifies=False),
    ),
}
"""Families of text models."""
