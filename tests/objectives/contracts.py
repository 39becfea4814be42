"""Cells in which every objective is tried: strategies, processes and options, each compared with one process.

An objective registers here by one entry of :data:`CONTRACTS`; ``test_contract`` tries all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Contract:
    """An objective's cells.

    Attributes:
        words: overrides of all cells.
        cells: a line for each number of processes, with the mark of its tests: overrides, cell after cell, between
            semicolons; ``@name`` is one of :data:`VARIANTS`.
        target: a module without which no loss is right; its spoiled gradient is found.
        bf16_steps: steps in bf16, whose error over a few steps is luck where there are pictures of any size.
    """

    words: str
    cells: str
    target: str | None = None
    bf16_steps: int = 3

    def parameters(self, name: str) -> Iterator[Any]:
        """Number of processes and overrides of each cell, as pytest's parameters after ``name``."""
        for line in self.cells.replace(";\n", "; ").strip().splitlines():
            place, _, cells = line.partition(":")
            processes, *marks = place.split()
            for cell in cells.split(";"):
                words = expanded(cell)
                chosen = [getattr(pytest.mark, mark) for mark in marks]
                yield pytest.param(name, int(processes), words, marks=chosen, id=f"{name} {processes} {cell.strip()}")


def expanded(words: str) -> list[str]:
    """Overrides, with those that ``@name`` stands for."""
    return [part for word in words.split() for part in VARIANTS.get(word, word).split()]


CLAP: dict[str, dict[str, Any]] = {
    "audio": {
        **{"num_mel_bins": 8, "spec_size": 32, "window_size": 2, "patch_embeds_hidden_size": 16, "hidden_size": 32},
        **{"depths": "[1,1]", "num_attention_heads": "[2,4]", "num_hidden_layers": 2, "hidden_dropout_prob": 0.0},
    },
    "text": {
        **{"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0},
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Fields of the towers of a tiny CLAP."""
CLAP_WORDS = "model=hf model.type=clap model.config.projection_dim=16" + "".join(
    f" model.config.{part}_config.{name}={value}" for part, fields in CLAP.items() for name, value in fields.items()
)
VARIANTS = {
    # With the usual seed a row's first query and key are nearly at right angles, and linear attention's norm divides
    # by what is left: weights that are rounded anew move the plain model's gradient by 2.7 times the bound.
    "@seed_1": "seed=1",
    "@roberta": "model.config.text_config.model_type=xlm-roberta model.config.text_config.max_position_embeddings=40",
    "@camembert": "model.type=camembert model.config.pad_token_id=1",
    "@electra": "model.type=electra model.config.embedding_size=32",
    "@distilbert": "model.type=distilbert model.config.n_layers=2"
    + "".join(
        f" ~model.config.{name}"
        for name in (
            *("intermediate_size", "type_vocab_size", "hidden_act", "hidden_dropout_prob"),
            *("attention_probs_dropout_prob", "layer_norm_eps"),
        )
    ),
    "@mpnet": "model.type=mpnet ~model.config.type_vocab_size model.config.pad_token_id=1",
    "@roberta1": "model.type=roberta model.config.pad_token_id=1",
    "@xlmr": "model.type=xlm-roberta model.config.pad_token_id=1",
    "@modernbert": "model.type=modernbert model.config.pad_token_id=0 model.config.local_attention=8"
    + "".join(
        f" ~model.config.{name}"
        for name in (
            *("type_vocab_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob"),
            "layer_norm_eps",
        )
    ),
    "@deberta": "model.type=deberta-v2 model.config.pad_token_id=0 model.config.relative_attention=true "
    "model.config.position_buckets=4 model.config.pos_att_type=[p2c,c2p] model.config.share_att_key=true "
    "model.config.norm_rel_ebd=layer_norm model.config.position_biased_input=false model.config.type_vocab_size=0",
    "@deberta2": "model.type=deberta-v2 model.config.pad_token_id=0 model.config.relative_attention=true "
    "model.config.pos_att_type=[p2c,c2p] model.config.conv_kernel_size=3 model.config.type_vocab_size=2",
    "@idefics": "model.type=idefics3 model.config.vision_config.model_type=idefics3_vision",
    "@adapters": "peft=lora peft.targets=[language] peft.train_also=[projector]",
    "@head_too": "peft=lora peft.train_also=[lm_head.*]",
    "@four_layers": "model.config.text_config.num_hidden_layers=4",
    "@moe": "model.type=qwen3_vl_moe model.config.text_config.model_type=qwen3_vl_moe_text "
    "model.config.vision_config.model_type=qwen3_vl_moe_vision model.config.text_config.num_experts=4 "
    "model.config.text_config.num_experts_per_tok=2 model.config.text_config.moe_intermediate_size=64",
    "@omni3": "model.type=qwen3_omni_moe_thinker model.config.text_config.model_type=qwen3_omni_moe_text "
    "model.config.text_config.num_experts=4 model.config.text_config.num_experts_per_tok=2 "
    "model.config.text_config.moe_intermediate_size=64 model.config.audio_config.downsample_hidden_size=8 "
    "model.config.vision_config.model_type=qwen3_omni_moe_vision_encoder ~model.config.vision_config.window_size "
    "~model.config.vision_config.fullatt_block_indexes ~model.config.text_config.tie_word_embeddings "
    "model.config.vision_config.num_position_embeddings=16 model.config.vision_config.deepstack_visual_indexes=[0,2] "
    "model.config.audio_config.model_type=qwen3_omni_moe_audio_encoder",
    "@whole": "strategy.parts.vision=whole",
    "@ears": "model.config.audio_config.hidden_size=32 model.config.audio_config.num_hidden_layers=2 "
    "model.config.audio_config.num_attention_heads=2 model.config.audio_config.subsampling_conv_channels=[16,8] "
    "model.config.audio_config.output_proj_dims=48",
    "@live": "peft=lora objective.reference=live",
    "@sharded": "objective.teacher_strategy=fsdp",
}
"""Overrides that several cells share."""

CONTRACTS = {
    "masked_lm": Contract(
        "objective=masked_lm model=bert_tiny",
        """
        1: strategy=single objective.loss_chunk_tokens=0
        2 exhaustive: strategy=ddp; strategy=fsdp data.micro_batch_size=2; strategy=tp; strategy=zero1;
            strategy=zero2; strategy=zero3; strategy=fsdp @modernbert; strategy=tp @modernbert;
            strategy=zero3 @modernbert; strategy=ddp @deberta; strategy=fsdp @deberta; strategy=tp @deberta2;
            strategy=tp @mpnet; strategy=zero3 @mpnet; strategy=fsdp @distilbert; strategy=tp @distilbert;
            strategy=tp @electra; strategy=zero3 @electra; strategy=fsdp @roberta1; strategy=tp @xlmr;
            strategy=ddp precision=bf16 @modernbert
        2: strategy=zero3 @deberta
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2; strategy=fsdp strategy.tp=2
        """,
        target="bert.encoder.layer.1.output.dense",
    ),
    "image_classification": Contract(
        "objective=image_classification data=digits model=vit_tiny objective.label_smoothing=0.1",
        """
        1 exhaustive: strategy=single
        2 slow: objective.mixup=0.4 objective.cutmix=1 strategy=fsdp data.micro_batch_size=2
        2 exhaustive: strategy=ddp; strategy=fsdp data.micro_batch_size=2; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=zero3
        4 exhaustive: strategy=fsdp strategy.tp=2
        """,
        target="vit.layers.1.mlp.fc2",
    ),
    "sequence_classification": Contract(
        "objective=sequence_classification model=bert_tiny model.config.num_labels=3",
        """
        1 exhaustive: strategy=single
        2 slow: strategy=tp
        2 exhaustive: strategy=ddp; strategy=fsdp data.micro_batch_size=2;
            model=llama_tiny model.config.pad_token_id=0 strategy=tp; strategy=zero1; strategy=zero2;
            strategy=zero3; strategy=tp @modernbert; strategy=zero3 @deberta; strategy=tp @mpnet
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2;
            model=llama_tiny model.config.pad_token_id=0 strategy=fsdp strategy.tp=2
        """,
        target="bert.encoder.layer.1.output.dense",
    ),
    "contrastive": Contract(
        "objective=contrastive data=captioned_digits model=clip_tiny",
        """
        1 exhaustive: strategy=single data.micro_batch_size=2
        2 slow: strategy=ddp data.micro_batch_size=2
        2 exhaustive: strategy=fsdp; strategy=zero3; strategy=tp; strategy=zero1; strategy=zero2; strategy=tp @whole;
            strategy=tp @whole model.freeze=[vision]; strategy=tp @whole model.type=metaclip_2
        4 exhaustive: strategy=ddp; strategy=fsdp strategy.tp=2 @whole
        4 slow: strategy=fsdp strategy.tp=2
        8 exhaustive: strategy=ddp data.global_batch_size=16
        """,
    ),
    "siglip": Contract(
        "objective=contrastive data=captioned_digits model=siglip2_base",
        """
        2 slow: strategy=zero3
        2 exhaustive: strategy=ddp; strategy=fsdp; strategy=tp; strategy=zero1; strategy=zero2; strategy=tp @whole
        """,
    ),
    "two_towers": Contract(
        "objective=contrastive model=vit_bert_tiny",
        """
        2 slow: strategy=fsdp
        2 exhaustive: strategy=ddp; strategy=ddp @roberta; strategy=tp; strategy=tp @roberta; strategy=zero3;
            strategy=zero3 @roberta
        4 exhaustive: strategy=fsdp strategy.tp=2 precision=bf16
        """,
    ),
    "sound_contrastive": Contract(
        f"objective=sound_contrastive {CLAP_WORDS}",
        """
        2 slow: strategy=fsdp data.micro_batch_size=2
        2 exhaustive: strategy=ddp; strategy=zero1; strategy=zero2; strategy=zero3; strategy=fsdp precision=bf16
        1 exhaustive: strategy=single data.micro_batch_size=2
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2
        """,
        target="audio_projection.linear2",
    ),
    "seq2seq": Contract(
        "objective=seq2seq data=number_words model=t5_tiny",
        """
        1 exhaustive: strategy=single objective.loss_chunk_tokens=0
        2 slow: strategy=ddp objective.loss_chunk_tokens=0
        2 exhaustive: strategy=ddp; strategy=fsdp data.micro_batch_size=2; strategy=tp;
            strategy=tp model.config.feed_forward_proj=relu; strategy=zero1; strategy=zero2; strategy=zero3
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2; strategy=fsdp strategy.tp=2
        """,
        target="decoder.block.1.layer.1.EncDecAttention.k",
    ),
    "ctc": Contract(
        "objective=ctc data=spoken_digits model=wav2vec2_tiny",
        """
        2 slow: strategy=ddp data.micro_batch_size=2; strategy=tp @head_too
        2 exhaustive: strategy=fsdp; strategy=zero3; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=ddp precision=bf16; strategy=zero2 precision=bf16; strategy=ddp @head_too; strategy=fsdp @head_too;
            strategy=zero3 @head_too
        1 exhaustive: strategy=single
        4 exhaustive: strategy=fsdp strategy.tp=2
        """,
    ),
    "sound_classification": Contract(
        "objective=sound_classification data=spoken_single_digits model=wav2vec2_tiny objective.label_smoothing=0.1",
        """
        2 slow: strategy=tp data.micro_batch_size=2
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=fsdp; strategy=zero3; strategy=zero1;
            strategy=zero2; strategy=ddp precision=bf16; strategy=fsdp model.type=hubert; model=ast_tiny strategy=zero3;
            strategy=zero3 model.type=wavlm; strategy=fsdp peft=lora peft.train_also=[projector.*,classifier.*];
            model=ast_tiny strategy=tp; model=ast_tiny strategy=ddp precision=bf16; model=whisper_tiny strategy=tp;
            model=whisper_tiny strategy=fsdp data.micro_batch_size=2
        1 exhaustive: strategy=single
        4 exhaustive: strategy=fsdp strategy.tp=2
        """,
        target="classifier",
        bf16_steps=20,
    ),
    "sound_tagging": Contract(
        "objective=sound_tagging data=spoken_digit_tags model=wav2vec2_tiny",
        """
        2 slow: strategy=zero3 model=ast_tiny
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=fsdp; strategy=tp; strategy=tp model=ast_tiny
        """,
    ),
    "speech_seq2seq": Contract(
        "objective=speech_seq2seq data=spoken_digits model=whisper_tiny",
        """
        2 slow: strategy=ddp data.micro_batch_size=2 model.config.apply_spec_augment=true objective.loss_chunk_tokens=0
        2 exhaustive: strategy=ddp data.micro_batch_size=2 model.config.apply_spec_augment=true;
            strategy=fsdp; strategy=zero3; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=ddp peft=lora; strategy=fsdp peft=lora; strategy=tp peft=lora; strategy=zero3 peft=lora
        1 exhaustive: strategy=single objective.loss_chunk_tokens=0
        4 exhaustive: strategy=fsdp strategy.tp=2 model=whisper_small
        """,
    ),
    "vision_language": Contract(
        "objective=vision_language model=llava_tiny data.packing=none",
        """
        1 exhaustive: strategy=single data.micro_batch_size=2 model.config.vision_feature_layer=-2
        2 slow: strategy=zero3 model.config.vision_feature_layer=-2
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=fsdp model.config.vision_feature_layer=-2;
            strategy=tp; strategy=zero2; strategy=pp;
            strategy.pp=2 strategy=pp strategy.activation_checkpointing=full;
            strategy.pp=2 strategy=pp precision=bf16; strategy.pp=2 strategy=pp model.freeze=[vision,language];
            strategy.pp=2 strategy=pp @adapters;
            strategy.pp=2 strategy=pp strategy.pipeline.schedule=interleaved_1f1b @four_layers;
            strategy.pp=2 strategy=pp strategy.pipeline.schedule=zbv @four_layers
        2 exhaustive: strategy=tp @whole model.freeze=[vision]; strategy=tp @whole @adapters;
            strategy=tp @whole peft=lora peft.targets=[vision,language] peft.train_also=[projector];
            strategy=tp @whole model.config.vision_feature_layer=[-2,-1] strategy.activation_checkpointing=selective;
            strategy=fsdp strategy.parts.activation_checkpointing=full
        4 slow: strategy=pp strategy.pp=2 strategy.tp=2 @whole
        4 exhaustive: strategy=fsdp strategy.pp=2;
            strategy=fsdp strategy.tp=2; strategy.pp=2 strategy=ddp; strategy.pp=2 strategy=pp strategy.tp=2;
            strategy=pp strategy.pp=2 strategy.tp=2 strategy.pipeline.schedule=zbv @four_layers @whole
        """,
    ),
    "parts": Contract(
        "objective=vision_language model=smolvlm_tiny data.packing=none",
        """
        1 exhaustive: strategy=single data.micro_batch_size=2 @idefics
        2 slow: strategy=fsdp data.micro_batch_size=2
        2 exhaustive: strategy=ddp; strategy=tp; strategy=zero3; strategy=tp @idefics; strategy=zero3 @idefics;
            strategy=pp; strategy=pp @idefics; strategy=tp @whole; strategy=tp @idefics @whole
        4 exhaustive: strategy=fsdp strategy.tp=2
        """,
    ),
    "read_whole": Contract(
        "objective=vision_language model=paligemma_tiny data.packing=none",
        """
        1 exhaustive: strategy=single data.micro_batch_size=2
        2 slow: strategy=tp
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=fsdp; strategy=zero3; strategy=pp;
            strategy=tp @whole
        4 exhaustive: strategy=fsdp strategy.tp=2
        """,
    ),
    "published_2025": Contract(
        "objective=vision_language data.packing=none",
        """
        1 exhaustive: model=gemma3_tiny strategy=single data.micro_batch_size=2;
            model=internvl_tiny strategy=single data.micro_batch_size=2;
            model=qwen35_tiny strategy=single data.micro_batch_size=2;
            model=mistral3_tiny strategy=single data.micro_batch_size=2;
            model=gemma4_tiny strategy=single data.micro_batch_size=2;
            model=llama4_tiny strategy=single data.micro_batch_size=2;
            model=phi4_multimodal_tiny strategy=single data.micro_batch_size=2
        2 slow: model=gemma3_tiny strategy=tp; model=llama4_tiny strategy=fsdp
        2 exhaustive: model=gemma3_tiny strategy=ddp data.micro_batch_size=2; model=gemma3_tiny strategy=fsdp;
            model=gemma3_tiny strategy=zero3; model=gemma3_tiny strategy=pp; model=gemma3_tiny strategy=fsdp @adapters;
            model=internvl_tiny strategy=ddp data.micro_batch_size=2; model=internvl_tiny strategy=fsdp;
            model=internvl_tiny strategy=zero3; model=internvl_tiny strategy=pp; model=internvl_tiny strategy=tp;
            model=internvl_tiny strategy=tp @adapters;
            model=qwen35_tiny strategy=ddp data.micro_batch_size=2; model=qwen35_tiny strategy=fsdp;
            model=qwen35_tiny strategy=zero3; model=qwen35_tiny strategy=pp; model=qwen35_tiny strategy=tp @seed_1;
            model=qwen35_tiny strategy=fsdp @adapters;
            model=mistral3_tiny strategy=ddp data.micro_batch_size=2; model=mistral3_tiny strategy=fsdp;
            model=mistral3_tiny strategy=zero3; model=mistral3_tiny strategy=pp; model=mistral3_tiny strategy=tp;
            model=gemma4_tiny strategy=ddp data.micro_batch_size=2; model=gemma4_tiny strategy=fsdp;
            model=llama4_tiny strategy=ddp data.micro_batch_size=2; model=llama4_tiny strategy=zero3;
            model=llama4_tiny strategy=pp; model=llama4_tiny strategy=tp; model=llama4_tiny strategy=tp @whole;
            model=llama4_tiny strategy=fsdp @adapters;
            model=phi4_multimodal_tiny strategy=ddp data.micro_batch_size=2; model=phi4_multimodal_tiny strategy=fsdp;
            model=phi4_multimodal_tiny strategy=zero2;
            model=phi4_multimodal_tiny strategy=tp;
            model=phi4_multimodal_tiny strategy=fsdp precision=bf16 @adapters;
            model=gemma4_tiny strategy=zero3; model=gemma4_tiny strategy=ddp @ears data.micro_batch_size=2;
            model=gemma4_tiny strategy=zero3 @ears
        2 slow: model=gemma4_tiny strategy=fsdp @ears
        2 exhaustive: model=gemma3_tiny strategy=tp @whole; model=internvl_tiny strategy=tp @whole;
            model=internvl_tiny strategy=tp @whole model.config.vision_feature_layer=-2;
            model=qwen35_tiny strategy=tp @whole
        4 exhaustive: model=gemma3_tiny strategy=fsdp strategy.tp=2; model=internvl_tiny strategy=fsdp strategy.tp=2
        """,
    ),
    "pictures_and_recordings": Contract(
        "objective=vision_language model=qwen25_omni_tiny data.packing=none",
        """
        1: strategy=single data.micro_batch_size=2; strategy=single @omni3 data.micro_batch_size=2
        2 slow: strategy=fsdp
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=zero3; strategy=zero2; strategy=pp; strategy=tp;
            strategy=fsdp @adapters; strategy=tp @whole; strategy=ddp @omni3 data.micro_batch_size=2;
            strategy=fsdp @omni3; strategy=zero3 @omni3; strategy=pp @omni3; strategy=tp @omni3;
            strategy=tp @omni3 @whole; strategy=fsdp @omni3 @adapters
        4 exhaustive: strategy=fsdp strategy.tp=2; strategy=fsdp strategy.tp=2 @omni3
        """,
    ),
    "recordings": Contract(
        "objective=vision_language model=qwen2_audio_tiny data.packing=none",
        """
        1: strategy=single data.micro_batch_size=2
        1 exhaustive: model=voxtral_tiny strategy=single data.micro_batch_size=2
        2 slow: strategy=fsdp; model=voxtral_tiny strategy=zero3
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=zero3; strategy=zero2; strategy=pp; strategy=tp;
            strategy=fsdp @adapters; model=voxtral_tiny strategy=fsdp; model=voxtral_tiny strategy=pp;
            model=voxtral_tiny strategy=tp; model=voxtral_tiny strategy=ddp @adapters;
            model=voxtral_tiny strategy=tp strategy.parts.audio=whole; strategy=tp strategy.parts.audio=whole
        4 exhaustive: strategy=fsdp strategy.tp=2; strategy=fsdp strategy.tp=2 strategy.parts.audio=whole
        """,
        target="model.audio_tower.layers.1.fc2",
    ),
    "own_sizes": Contract(
        "objective=vision_language data.packing=none",
        """
        1: model=qwen25_vl_tiny strategy=single data.micro_batch_size=2
        2 exhaustive: model=qwen3_vl_tiny strategy=fsdp; model=qwen3_vl_tiny strategy=pp;
            model=qwen25_vl_tiny strategy=tp; model=qwen25_vl_tiny strategy=zero3; model=qwen25_vl_tiny strategy=fsdp;
            model=qwen3_vl_tiny strategy=tp; model=qwen25_vl_tiny strategy=pp;
            model=qwen3_vl_tiny strategy=ddp data.micro_batch_size=2;
            model=qwen25_vl_tiny strategy=ddp data.micro_batch_size=2;
            model=qwen25_vl_tiny strategy=zero2 data.micro_batch_size=2;
            model=qwen25_vl_tiny strategy=ddp @adapters; model=qwen25_vl_tiny strategy=fsdp @adapters;
            model=qwen25_vl_tiny strategy=tp @adapters; model=qwen25_vl_tiny strategy=zero3 @adapters;
            model=qwen3_vl_tiny strategy=ddp @adapters; model=qwen3_vl_tiny strategy=fsdp @adapters;
            model=qwen3_vl_tiny strategy=zero3 @adapters; model=qwen25_vl_tiny strategy=ddp precision=bf16;
            model=qwen25_vl_tiny strategy=fsdp precision=bf16;
            model=qwen25_vl_tiny strategy=tp precision=bf16; model=qwen25_vl_tiny strategy=zero3 precision=bf16;
            model=qwen3_vl_tiny strategy=ddp precision=bf16; model=qwen3_vl_tiny strategy=fsdp precision=bf16;
            model=qwen3_vl_tiny strategy=tp precision=bf16; model=qwen3_vl_tiny strategy=zero3 precision=bf16
        4 exhaustive: model=qwen25_vl_tiny strategy=fsdp strategy.tp=2;
            model=qwen25_vl_tiny strategy=fsdp strategy.pp=2; model=qwen3_vl_tiny strategy=fsdp strategy.tp=2 @whole;
            model=qwen25_vl_tiny strategy=pp strategy.pp=2 strategy.tp=2 @whole
        2 slow: model=qwen3_vl_tiny strategy=tp @whole trainer.gradient_clip_val=0.1
        2 exhaustive: model=qwen3_vl_tiny strategy=tp @adapters;
            model=qwen3_vl_tiny strategy=zero3; model=qwen3_vl_tiny strategy=tp @whole @adapters;
            model=qwen25_vl_tiny strategy=tp @whole strategy.activation_checkpointing=full;
            model=qwen3_vl_tiny strategy=tp @whole precision=bf16; model=qwen3_vl_tiny strategy=fsdp @moe;
            model=qwen3_vl_tiny strategy=tp @moe; model=qwen3_vl_tiny strategy=tp @moe @whole;
            model=qwen3_vl_tiny strategy=pp @moe; model=qwen3_vl_tiny strategy=zero3 @moe
        """,
        bf16_steps=20,
    ),
    "picture_packing": Contract(
        "objective=vision_language model=llava_tiny data.packing=best_fit",
        """
        1 exhaustive: strategy=single data.micro_batch_size=2
        2 slow: model=qwen25_vl_tiny strategy=fsdp
        2 exhaustive: strategy=fsdp; strategy=ddp data.micro_batch_size=2; strategy=tp; strategy=zero3;
            model=qwen25_vl_tiny strategy=ddp; model=qwen25_vl_tiny strategy=tp;
            model=qwen25_vl_tiny strategy=zero3; model=qwen25_vl_tiny strategy=pp;
            model=qwen3_vl_tiny strategy=ddp; model=qwen3_vl_tiny strategy=fsdp; model=qwen3_vl_tiny strategy=fsdp @moe;
            model=qwen3_vl_tiny strategy=tp; model=qwen3_vl_tiny strategy=zero3;
            model=qwen3_vl_tiny strategy=pp; model=smolvlm_tiny strategy=ddp; model=smolvlm_tiny strategy=fsdp;
            model=smolvlm_tiny strategy=tp; model=smolvlm_tiny strategy=zero3; model=smolvlm_tiny strategy=pp;
            model=internvl_tiny strategy=fsdp; model=internvl_tiny strategy=tp; model=internvl_tiny strategy=pp;
            model=mistral3_tiny strategy=ddp; model=mistral3_tiny strategy=tp; model=mistral3_tiny strategy=pp;
            model=qwen2_audio_tiny strategy=ddp; model=qwen2_audio_tiny strategy=pp;
            model=qwen25_omni_tiny strategy=fsdp @omni3; model=qwen25_omni_tiny strategy=tp @omni3
        2 slow: strategy=pp
        """,
    ),
    "distill": Contract(
        "objective=distill model=llama_tiny",
        """
        1: strategy=single objective.loss_chunk_tokens=0
        2: strategy=ddp objective.divergence=reverse; strategy=pp objective.teacher_weight=1; strategy=zero3 @sharded
        2 exhaustive: strategy=tp objective.divergence=jensen_shannon;
            strategy=fsdp objective.divergence=jensen_shannon objective.temperature=2;
            strategy=ddp @sharded; strategy=zero1; strategy=zero2 objective.divergence=jensen_shannon;
            strategy=ep model=mixtral_tiny; strategy=fsdp peft=lora model=gpt2_tiny @sharded;
            strategy=fsdp @sharded; strategy=zero3; strategy=tp objective.divergence=reverse @sharded
        4 exhaustive: strategy=megatron strategy.pp=2 @sharded;
            strategy=megatron strategy.tp=2 strategy.pp=2 strategy.pipeline.schedule=zbv @sharded
        """,
    ),
    "dpo": Contract(
        "objective=dpo data=preferences_jsonl model=llama_tiny",
        """
        1 exhaustive: strategy=single objective.loss_chunk_tokens=0
        2: strategy=ddp objective.loss=ipo; strategy=fsdp precision=bf16; strategy=cp objective.label_smoothing=0.1
        2 exhaustive: strategy=pp; strategy=cp; strategy=fsdp objective.label_smoothing=0.1;
            strategy=tp strategy.sequence_parallel=true; strategy=zero3; strategy=zero1; strategy=zero2;
            strategy=cp strategy.context.method=ulysses objective.loss=ipo;
            strategy=tp peft=lora; strategy=fsdp @live; strategy=cp @live; strategy=zero3 @live;
            strategy=ep model=mixtral_tiny
        4 exhaustive: strategy=pp strategy.tp=2; strategy=fsdp strategy.tp=2 model=gpt2_tiny
        """,
    ),
    "text_embedding": Contract(
        "objective=text_embedding data=stdlib_pairs model=bert_tiny",
        """
        1 exhaustive: strategy=single objective.symmetric=true
        2: strategy=fsdp objective.pooling=cls objective.matryoshka_sizes=[4];
            strategy=zero3 objective.symmetric=true; strategy=tp @modernbert;
            strategy=ddp objective.loss=margin_mse data.micro_batch_size=2
        2 exhaustive: strategy=ddp data.micro_batch_size=2;
            strategy=tp; strategy=zero1; strategy=zero2 objective.mask_equal=false;
            strategy=ddp objective.mask_margin=0.1 objective.symmetric=true;
            strategy=ddp objective.normalize=false objective.scale=0.1; strategy=fsdp objective.pooling=last_token;
            strategy=fsdp peft=lora; strategy=ddp precision=bf16;
            strategy=fsdp model.type=roberta model.config.pad_token_id=1; strategy=tp @electra; strategy=tp @camembert;
            strategy=tp model.type=roberta model.config.pad_token_id=1; strategy=tp @distilbert;
            strategy=fsdp @distilbert; strategy=zero3 @distilbert; strategy=fsdp @mpnet; strategy=zero3 @mpnet;
            strategy=zero3 @electra; strategy=zero3 @camembert; strategy=tp @mpnet; strategy=ddp @modernbert;
            strategy=zero3 @modernbert; strategy=fsdp @deberta; strategy=tp @deberta; strategy=tp @deberta2;
            strategy=zero3 @deberta; strategy=tp model=llama_tiny objective.pooling=last_token;
            strategy=fsdp model=qwen3_tiny model.bidirectional=true;
            strategy=zero3 model=qwen3_tiny objective.pooling=last_token;
            strategy=tp peft=lora model=qwen3_tiny model.bidirectional=true objective.pooling=cls;
            strategy=tp model=llama_tiny strategy.sequence_parallel=true; strategy=fsdp objective.loss=kl;
            strategy=zero3 objective.loss=margin_mse objective.normalize=false;
            strategy=tp objective.loss=kl objective.matryoshka_sizes=[4] objective.teacher_scale=3
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2; strategy=fsdp strategy.tp=2
        """,
        target="encoder.layer.1.output.dense",
    ),
    "text_similarity": Contract(
        "objective=text_similarity data=scored_pairs model=bert_tiny",
        """
        1: strategy=single objective.matryoshka_sizes=[4]
        2: strategy=fsdp data.micro_batch_size=2
        2 exhaustive: strategy=ddp objective.loss=cosine; strategy=zero3; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=ddp objective.normalize=false objective.scale=0.1; strategy=fsdp objective.pooling=cls;
            strategy=fsdp peft=lora; strategy=ddp precision=bf16;
            strategy=fsdp model.type=roberta model.config.pad_token_id=1; strategy=tp @distilbert
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2; strategy=fsdp strategy.tp=2
        """,
        target="encoder.layer.1.output.dense",
    ),
    "reranker": Contract(
        "objective=reranker data=embedding_pairs model=bert_tiny",
        """
        1 exhaustive: strategy=single objective.loss=listwise
        2: strategy=fsdp objective.loss=margin data.micro_batch_size=2;
            strategy=tp objective.loss=listwise objective.match_tokens=true
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=fsdp; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=zero3; strategy=ddp objective.loss=listwise; strategy=zero3 objective.match_tokens=true;
            strategy=fsdp precision=bf16; strategy=fsdp peft=lora peft.train_also=[classifier.*];
            strategy=fsdp model.type=roberta model.config.pad_token_id=1; strategy=tp @electra; strategy=tp @camembert;
            strategy=tp @distilbert; strategy=fsdp @distilbert; strategy=zero3 @electra;
            model=llama_tiny model.config.pad_token_id=0 strategy=tp; strategy=tp @modernbert; strategy=zero3 @deberta
        4 exhaustive: strategy=hsdp strategy.dp_replicate=2; strategy=fsdp strategy.tp=2
        """,
        target="bert.encoder.layer.1.output.dense",
    ),
    "orpo": Contract(
        "objective=orpo data=preferences_jsonl model=llama_tiny",
        """
        1: strategy=single objective.loss_chunk_tokens=0
        2: strategy=fsdp objective.odds_weight=0.5
        2 exhaustive: strategy=cp; strategy=ddp; strategy=pp; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=zero3;
            strategy=tp strategy.sequence_parallel=true; strategy=fsdp peft=lora; strategy=fsdp precision=bf16;
            strategy=ep model=mixtral_tiny
        4 exhaustive: strategy=fsdp strategy.tp=2 model=gpt2_tiny
        """,
    ),
    "reward": Contract(
        "objective=reward data=preferences_jsonl model=llama_tiny model.config.pad_token_id=0",
        """
        1 exhaustive: strategy=single objective.center_weight=0.1
        2: strategy=fsdp objective.center_weight=0.1
        2 exhaustive: strategy=tp; strategy=fsdp; strategy=zero3; strategy=ddp data.micro_batch_size=2; strategy=zero1;
            strategy=zero2;
            strategy=fsdp precision=bf16; strategy=ddp model=bert_tiny;
            strategy=fsdp peft=lora peft.train_also=[score.weight]
        """,
    ),
    "kto": Contract(
        "objective=kto data=unpaired_jsonl model=llama_tiny",
        """
        1 exhaustive: strategy=single objective.loss_chunk_tokens=0
        2: strategy=fsdp objective.desirable_weight=1.5 data.micro_batch_size=2; strategy=pp
        2 exhaustive: strategy=ddp data.micro_batch_size=2; strategy=tp; strategy=zero3; strategy=cp; strategy=zero1;
            strategy=zero2; strategy=tp strategy.sequence_parallel=true;
            strategy=fsdp precision=bf16; strategy=fsdp peft=lora; strategy=fsdp @live; strategy=zero3 @live;
            strategy=cp strategy.context.method=ulysses; strategy=ep model=mixtral_tiny
        4 exhaustive: strategy=pp strategy.tp=2; strategy=fsdp strategy.tp=2 model=gpt2_tiny
        """,
    ),
    "cpo": Contract(
        "objective=cpo data=preferences_jsonl model=llama_tiny",
        """
        1 exhaustive: strategy=single objective.label_smoothing=0.1
        2: strategy=fsdp objective.chosen_weight=0.5 objective.label_smoothing=0.1
        2 exhaustive: strategy=ddp; strategy=pp; strategy=cp; strategy=tp; strategy=zero1; strategy=zero2;
            strategy=zero3; strategy=fsdp peft=lora; strategy=fsdp precision=bf16
        """,
    ),
    "simpo": Contract(
        "objective=simpo data=preferences_jsonl model=llama_tiny",
        """
        1 exhaustive: strategy=single objective.margin=0.3
        2: strategy=tp objective.beta=1 objective.margin=0.3
        2 exhaustive: strategy=ddp; strategy=fsdp; strategy=pp; strategy=cp; strategy=zero1; strategy=zero2;
            strategy=zero3; strategy=fsdp peft=lora; strategy=fsdp precision=bf16
        """,
    ),
}
