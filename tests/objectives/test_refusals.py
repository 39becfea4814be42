"""What an objective cannot do is refused before a launch, in a line that names the key and the fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from tests.data.text.test_pair_template import configured, rows_of
from tests.objectives import test_own_sizes, test_vision_language
from tests.objectives.harness import answers_config
from tests.objectives.test_distill import small_data, with_teacher
from tests.objectives.test_sequence_classification import write_rows


def words_of(given: str, folder: Path, *overrides: str) -> RunConfig:
    return compose([*given.split(), "trainer.accelerator=cpu", *overrides])[0]


def distilled(folder: Path, *overrides: str) -> RunConfig:
    with_teacher(folder)
    return small_data(folder, *overrides)


def labelled(folder: Path, *overrides: str) -> RunConfig:
    paths = [f"data.paths=[{write_rows(folder / 'rows.jsonl')}]"] if "data=labelled_jsonl" in overrides else []
    return compose(["objective=sequence_classification", *overrides, *paths])[0]


def ranked(folder: Path, *overrides: str) -> RunConfig:
    return configured(folder, rows_of(4), *overrides)


REFUSED: list[tuple[Callable[..., RunConfig], str]] = [
    (
        partial(answers_config, "dpo"),
        """
        data=synthetic -> data.source=synthetic: objective.name=dpo trains on preferences; use data=preferences_jsonl
        objective=causal_lm -> data.source=preferences_jsonl: objective.name=causal_lm trains on packed text
        objective.reference=live -> objective.reference=live: it is the model without its adapters, which must be
        objective.reference=live peft=lora peft.train_also=[norm.weight] -> must be all that is trained
        objective.reference=live peft=lora strategy=pp trainer.devices=2
            -> objective.reference=live: a pipeline's step has one forward pass; use objective.reference=cached
        objective.beta=0 -> objective.beta=0.0: use a number above 0
        objective.label_smoothing=0.5 -> objective.label_smoothing=0.5: use a number below 0.5
        objective.loss=ipo objective.label_smoothing=0.1 -> objective.loss=ipo has none
        data.chat_template=null -> data.source=preferences_jsonl needs a chat template and the tokenizer has none
        """,
    ),
    (
        partial(answers_config, "reward"),
        """
        model.config.pad_token_id=null trainer.devices=2 -> model.config.pad_token_id
        model.config.pad_token_id=0 +model.config.num_labels=3 trainer.devices=2
            -> model.config.num_labels=3: the head of objective=reward has one output; leave it out
        model.config.pad_token_id=0 model.type=mamba trainer.devices=2 -> model.type=mamba
        model.config.pad_token_id=0 strategy=pp trainer.devices=2 -> pp
        """,
    ),
    (
        distilled,
        """
        objective.teacher=nowhere -> objective.teacher=nowhere: holds no config.json of a model, and no
        objective.temperature=0 -> objective.temperature=0.0: use a number above 0
        objective.teacher_weight=1.5 -> objective.teacher_weight=1.5: use a number of at most 1
        strategy=cp trainer.devices=2 -> objective.name=distill cannot be spread over it
        model.config.vocab_size=400 -> its vocabulary has 384 tokens, the student's 400
        """,
    ),
    (
        partial(words_of, "objective=masked_lm model=bert_tiny"),
        """
        strategy=pp trainer.devices=2 -> strategy.pp=2: bert cannot be cut into stages
        strategy=cp trainer.devices=2 -> strategy.cp=2: attention of the bert family cannot run over several
        model=llama_tiny -> model.type=llama: transformers has no masked language model llama
        objective.mask_share=-1 -> objective.mask_share=-1.0: use a number of at least 0
        """,
    ),
    (
        partial(words_of, "objective=seq2seq data=number_words model=t5_tiny"),
        """
        strategy=pp trainer.devices=2 -> strategy.pp=2: t5 cannot be cut into stages
        strategy=cp trainer.devices=2 -> strategy.cp=2: attention of the t5 family cannot run over several
        strategy=ep trainer.devices=2 -> strategy.ep=2
        strategy=tp trainer.devices=2 strategy.sequence_parallel=true -> the t5 family has no plan for it
        strategy=tp trainer.devices=3 -> strategy.tp=3: it does not divide the 8 attention heads
        model=llama_tiny
            -> model.type=llama: transformers has no sequence-to-sequence model llama; use a sequence-to-sequence
            model (model=t5_tiny or model=t5_mini)
        objective=causal_lm data=stdlib_text
            -> no causal language model t5; use a causal language model (model=gpt2_tiny, model=llama_tiny,
            model=mixtral_tiny or model=qwen3_tiny), or objective=seq2seq
        objective=masked_lm data=stdlib_text -> transformers has no masked language model t5
        data=stdlib_text -> data.source=stdlib_text: objective.name=seq2seq trains on pairs; use data=pairs_jsonl or
        objective=causal_lm model=llama_tiny -> data.source=number_words: objective.name=causal_lm trains on packed text
        model.config.pad_token_id=null -> model.config.pad_token_id=null: give the token that the decoder begins
        data.numbers.digits=10 -> data.numbers.digits=10: use a number of at most 9
        data.target_len=0 -> data.target_len=0: use a number of at least 1
        """,
    ),
    (
        labelled,
        """
        model=bert_tiny model.config.num_labels=3 strategy=pp trainer.devices=2
            -> strategy.pp=2: objective.name=sequence_classification cannot
        model=llama_tiny model.config.num_labels=3 model.config.pad_token_id=0 strategy=cp trainer.devices=2
            -> strategy.cp=2: objective.name=sequence_classification cannot
        model=llama_tiny data=labelled_jsonl -> model.config.pad_token_id=null
        model=bert_tiny model.config.num_labels=3
            -> data.source=stdlib_text: objective.name=sequence_classification trains on labelled text; use data=
        """,
    ),
    (
        ranked,
        """
        +model.config.num_labels=3 -> model.config.num_labels=3: the head of objective=reranker has one output
        model=llama_tiny model.config.pad_token_id=null -> model.config.pad_token_id=null
        model=llama_tiny model.config.pad_token_id=-1 -> model.config.pad_token_id=-1: it finds a row's last token
        model.type=mamba -> model.type=mamba
        strategy=pp trainer.devices=2 -> strategy.pp=2: objective.name=reranker cannot
        peft=lora -> peft.train_also=[]: the new head of a classifier would stay untrained
        "data.query_prompt='find: '" -> data.query_prompt=find: : no program that loads the exported folder
        data=stdlib_text -> data.source=stdlib_text
        model=llama_tiny model.config.pad_token_id=0 objective.match_tokens=true
            -> objective.match_tokens=true: the attention of llama has no such start; leave it out, or use a model of
        """,
    ),
    (
        partial(words_of, "model=hf model.path=null"),
        """
        model.type=modernbert objective=masked_lm strategy=pp trainer.devices=2 -> strategy.pp=2: modernbert cannot
        model.type=mpnet objective=masked_lm strategy=cp trainer.devices=2 -> strategy.cp=2: attention of the mpnet
        model.type=deberta-v2 objective=text_embedding strategy=pp trainer.devices=2 -> strategy.pp=2:
        model.type=deberta-v2 objective=masked_lm data.packing=best_fit
            -> data.packing=best_fit: attention of the deberta-v2 family does not separate documents of a row; use
            data.packing=none
        model.type=deberta-v2 objective=masked_lm model.config.legacy=false
            -> model.config.legacy=false: transformers names no output head of such a model
        model.type=albert objective=masked_lm -> model.type=albert: objective.name=masked_lm does not train
        """,
    ),
    (
        partial(words_of, ""),
        """
        objective=text_embedding data=stdlib_pairs model=llama_tiny objective.pooling=cls
            -> objective.pooling=cls: the first token of a causal model sees no other; use last_token, or
            model.bidirectional=true
        objective=text_embedding data=stdlib_pairs model=bert_tiny model.bidirectional=true
            -> the bert family is no decoder
        objective=causal_lm model=llama_tiny model.bidirectional=true -> objective.name=causal_lm makes no vectors
        objective=text_embedding data=stdlib_pairs model=gpt2_tiny
            -> objective.name=text_embedding does not train the gpt2 family
        """,
    ),
    (
        partial(words_of, "objective=text_embedding model=bert_tiny data=embedding_pairs data.scores_column=scores"),
        """
        objective.loss=in_batch
            -> data.scores_column=scores: objective.loss=in_batch reads none; leave it out, or use objective.loss=
        objective.loss=kl data.scores_column=null
            -> objective.loss=kl: the data has no teacher's scores; use data=embedding_pairs data.scores_column=
        objective.loss=kl objective.symmetric=true
            -> objective.symmetric=true: objective.loss=kl compares a query
        objective.loss=margin_mse objective.mask_margin=0.1
            -> objective.mask_margin=0.1: objective.loss=margin_mse
        objective=reranker
            -> data.scores_column=scores: objective=reranker reads no scores
        data.random_negatives=3
            -> data.random_negatives=3: objective=text_embedding takes the other texts of the step as negatives; leave
        data=scored_pairs objective=text_similarity ~data.scores_column +data.random_negatives=3
            -> data.random_negatives
        """,
    ),
    (
        partial(words_of, "objective=contrastive data=captioned_digits model=clip_tiny"),
        """
        strategy=pp trainer.devices=2 -> objective.name=contrastive
        data.seq_len=64 -> data.seq_len=64
        objective.max_scale=0.5 -> objective.max_scale=0.5
        model=llama_tiny -> llama
        """,
    ),
    (
        partial(words_of, "objective=vision_language data=digit_questions model=hf"),
        """
        model.type=gemma3n -> model.type=gemma3n: objective.name=vision_language does not train the gemma3n family
        model.type=aya_vision -> model.type=aya_vision: objective.name=vision_language does not train the aya_vision
        """,
    ),
    (
        test_vision_language.chats,
        """
        strategy=cp trainer.devices=2 -> objective.name=vision_language
        strategy=pp trainer.devices=4 -> strategy.pp=4: 1f1b cuts 3 layers into 4 stages
        strategy=pp trainer.devices=2 data.cache_features=true model.freeze=[vision]
            -> data.cache_features=true: every process that trains reads them; use strategy.pp=1, or false
        data.chat_template=null -> data.chat_template
        model.config.vision_config.model_type=metaclip_2_vision_model -> use one of clip_vision_model
        model.freeze=[audio] -> model.freeze=audio: matches no parameter
        """,
    ),
    (
        test_own_sizes.chats,
        """
        model=qwen3_vl_tiny strategy=pp trainer.devices=2 strategy.pipeline.layers=[1,2]
            -> strategy.pipeline.layers=1,2: pictures enter after each of the first 2 layers, and the first stage has
            only 1; give the first at least 2, e.g. strategy.pipeline.layers=[2,1]
        model=qwen3_vl_tiny strategy=pp trainer.devices=3 -> use a pipeline of fewer stages: at most 2
        strategy=cp trainer.devices=2 -> objective.name=vision_language
        model=qwen3_vl_tiny strategy=tp trainer.devices=2 strategy.sequence_parallel=true -> strategy.sequence_parallel
        model.config.vision_config.depht=4 -> model.config.vision_config.depth?
        """,
    ),
    (
        partial(words_of, "objective=vision_language data=digit_questions"),
        """
        model=llama_tiny model.config={} -> llama
        model=internvl_tiny data.fit=crop -> data.fit=crop: the model sees pictures in tiles
        model=llama4_tiny data.min_pixels=64 -> data.min_pixels=64: a canvas has no fewest tiles
        model=llama4_tiny model.config.vision_config.pixel_shuffle_ratio=0.3
            -> model.config.vision_config.pixel_shuffle_ratio=0.3: a picture has 4 x 4 patches
        model=llama4_tiny strategy=tp trainer.devices=2 model.config.text_config.intermediate_size_mlp=257
            -> strategy.tp=2: it does not divide the feed-forward width, intermediate_size_mlp=257
        model=phi4_multimodal_tiny data.min_pixels=64 -> data.min_pixels=64: a mosaic has no fewest tiles
        model=phi4_multimodal_tiny model.config.vision_config.patch_size=16 -> patch_size=16: a tile has 16 pixels
        model=phi4_multimodal_tiny model.config.vision_config.crop_size=32 -> crop_size=32: its tower sees such tiles
        model=phi4_multimodal_tiny strategy=zero3 trainer.devices=2 -> strategy.deepspeed.stage=3: phi4_multimodal runs
        model=phi4_multimodal_tiny strategy=pp trainer.devices=2 -> strategy.pp=2
        model=llama4_tiny data.max_pixels=60 -> data.max_pixels=60: a tile has 64 pixels
        model=internvl_tiny data.max_pixels=60 -> data.max_pixels=60: a tile has 64 pixels
        model=internvl_tiny model.config.vision_config.patch_size=8 -> downsample_ratio=0.5: a picture has 1 x
        model=gemma3_tiny model.config.mm_tokens_per_image=9 -> mm_tokens_per_image=9: a picture has 4 x 4
        model=gemma3_tiny data.packing=best_fit -> gemma3 reads pictures from both sides
        model=qwen35_tiny data.packing=best_fit -> data.packing=best_fit
        model=mistral3_tiny data.max_side=3 -> data.max_side=3: a place has so many pixels; use at least 4
        model=mistral3_tiny data.fit=crop -> data.fit=crop: the model takes pictures in native size
        model=gemma4_tiny data.max_pixels=15 -> data.max_pixels=15: a place has so many pixels; use at least 16
        model=gemma4_tiny data.mean=[0.5] -> the model normalises pictures by itself
        model=gemma4_tiny strategy=pp trainer.devices=2 -> strategy.pp=2
        model=internvl_tiny model.config.vision_config.use_qk_norm=true strategy=tp trainer.devices=2
            -> strategy.tp=2: this kind of internvl has weights that cannot be cut
        model=qwen25_vl_tiny data.image_size=8 -> data.image_size=8: the model takes pictures in native size
        model=qwen25_vl_tiny data.fit=crop -> data.fit=crop: the model takes pictures in native size
        model=qwen3_vl_tiny data.max_pixels=15 -> data.max_pixels=15: a place has 16 pixels
        model=llava_tiny data.max_pixels=99 -> data.max_pixels=99: the model's pictures have one size
        model=qwen25_vl_tiny model.config.vision_config.in_channels=4 -> pictures are grey or RGB
        model=smolvlm_tiny data.fit=crop -> data.fit=crop: the model sees pictures in parts
        model=smolvlm_tiny data.image_size=4 -> data.image_size=4: the model's image_size is 8
        model=smolvlm_tiny data.max_side=7 -> data.max_side=7: a part has so many pixels; use at least 8
        model=smolvlm_tiny data.max_pixels=99 -> data.max_pixels=99: the model's pictures have one size
        model=smolvlm_tiny model.config.scale_factor=3
            -> model.config.scale_factor=3: a part of 8 pixels has 8/2 patches across
        model=llava_tiny data.max_side=8 -> data.max_side=8: the model does not see pictures in parts
        """,
    ),
]
"""A configuration, and what each of its changes gives: overrides, an arrow, and a part of the line."""


def cells() -> Iterator[Any]:
    for build, rows in REFUSED:
        for row in re.split(r"\n {8}(?=\S)", rows.strip()):
            words, _, line = " ".join(row.split()).partition("-> ")
            yield pytest.param(build, words, line, id=f"{line[:30]} {words}")


@pytest.mark.parametrize(("build", "words", "line"), [*cells()])
def test_what_cannot_be_done_is_refused_before_a_launch(
    tmp_path: Path, build: Callable[..., RunConfig], words: str, line: str
) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as refused:
        preflight(build(tmp_path, *shlex.split(words)))
    assert line in str(refused.value)


CHATS = (
    "objective=vision_language model=llava_tiny data=picture_chats data.paths=[chats.jsonl] data.chat_template=chatml "
    "model.freeze=[vision] data.shift=0"
)
CLASSES = "objective=image_classification data=digits model=vit_tiny data.shift=0"


@pytest.mark.parametrize(
    ("given", "words", "line"),
    [
        (CHATS, "model.freeze=[]", "its tower learns; use model.freeze=[vision], or false"),
        (CHATS, "peft=lora", "its tower gets adapters; use peft.targets=[language], or false"),
        (CHATS, "data.flip=true", "each step changes its pictures; use data.flip=false, or false"),
        (CHATS, "data.random_crop=0.5", "each step changes its pictures; use data.random_crop=1.0, or false"),
        (
            CHATS,
            "model.config.vision_config.attention_dropout=0.1",
            "its tower drops out; use model.config.vision_config.attention_dropout=0, or false",
        ),
        (CHATS, "model=qwen3_vl_tiny", "what the tower of qwen3_vl sees is not kept; use llava, or false"),
        (CLASSES, "peft=lora peft.targets=[query]", "its tower gets adapters; use peft=none, or false"),
        (CLASSES, "objective.mixup=0.2", "each step changes its pictures; use objective.mixup=0, or false"),
        (CLASSES, "data.flip=true", "each step changes its pictures; use data.flip=false, or false"),
        (
            CLASSES,
            "model.config.hidden_dropout_prob=0.1",
            "its tower drops out; use model.config.hidden_dropout_prob=0, or false",
        ),
    ],
)
def test_what_would_change_cached_features_is_refused(given: str, words: str, line: str) -> None:
    config = compose([*given.split(), "data.cache_features=true", *words.split()])[0]
    assert [str(error) for error in config.objective.run_errors(config)] == [f"data.cache_features=true: {line}"]
