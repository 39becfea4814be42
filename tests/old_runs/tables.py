"""What every version computes alike: hashes of configurations, digests of data, parameters, random numbers.

A run is found again by its hash and its data's digest. Its weights are drawn by the names of its parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hydra.compose import compose_in, hydra_session
from mgpu_pipe.config.run_identity import mathematics_hash
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.samples import random_of
from mgpu_pipe.data.text.heldout_split import document_hash

CONF = Path(__file__).parents[2] / "conf"
HASHED = ("experiment", "model", "data", "objective", "optimizer", "scheduler", "peft")
"""Groups of ``conf`` whose options decide a run's numbers."""
SAMPLED_OPTIONS = ("experiment=quickstart", "experiment=vlm_digits", "optimizer=muon", "optimizer=adamw_bf16")
TOKENIZER = "data.tokenizer=inputs/model"
DATA = {
    "text_files": ("data=text_files", "data.paths=[inputs/files/*.txt]", TOKENIZER),
    "jsonl": ("data=jsonl", "data.paths=[inputs/labels.jsonl]", "data.validation_paths=[inputs/files/held_out.jsonl]")
    + (TOKENIZER,),
    "synthetic": ("data=synthetic", "data.synthetic.num_documents=20", TOKENIZER),
    "chat_jsonl": ("data=chat_jsonl", "data.paths=[inputs/files/chats.jsonl]", "data.chat_template=chatml", TOKENIZER),
    "spoken_chat": ("data=spoken_chat", "data.chat_template=chatml", "data.numbers.count=50", TOKENIZER),
    "rule_facts": ("data=rule_facts", TOKENIZER),
    "mixture": (
        "data=mixture",
        "data.sources={a: {source: jsonl, paths: [inputs/labels.jsonl]}, b: {source: spoken_chat, weight: 2}}",
        "data.chat_template=chatml",
        "data.numbers.count=50",
        TOKENIZER,
    ),
    "labelled_jsonl": ("data=labelled_jsonl", "data.paths=[inputs/labels.jsonl]", "objective=sequence_classification")
    + ("model=bert_tiny", TOKENIZER),
    "number_words": ("data=number_words", "data.numbers.count=50", "objective=seq2seq", "model=t5_tiny") + (TOKENIZER,),
    "pairs_jsonl": ("data=pairs_jsonl", "data.paths=[inputs/labels.jsonl]", "objective=seq2seq", "model=t5_tiny")
    + ("data.source_column=text", "data.target_column=label", TOKENIZER),
    "spoken_preferences": ("data=spoken_preferences", "data.chat_template=chatml", "data.numbers.count=50")
    + ("objective=dpo", TOKENIZER),
    "preferences_jsonl": ("data=preferences_jsonl", "data.paths=[inputs/files/preferences.jsonl]", "objective=dpo")
    + ("data.chat_template=chatml", TOKENIZER),
    "digits": ("data=digits", "objective=image_classification", "model=vit_tiny"),
    "image_folder": ("data=image_folder", "data.paths=[inputs/files/pictures]", "objective=image_classification")
    + ("model=vit_tiny",),
    "captioned_digits": ("data=captioned_digits", "objective=contrastive", "model=clip_tiny"),
    "captions": ("data=captions", "data.paths=[inputs/files/captions.csv]", "objective=contrastive", "model=clip_tiny")
    + ("data.image_column=path",),
    "digit_questions": ("data=digit_questions", "objective=vision_language", "model=llava_tiny"),
    "picture_chats": ("data=picture_chats", "data.paths=[inputs/files/picture_chats.jsonl]", "model=llava_tiny")
    + ("objective=vision_language", "data.chat_template=chatml"),
    "moving_shapes": ("experiment=video_shapes",),
    "audio_list": ("data=audio_list", "data.paths=[inputs/tones/spoken.csv]", "objective=ctc", "model=wav2vec2_tiny"),
}
"""By the source's name: a run over it. Words of the standard library and spoken digits differ by machine;
``rule_chat``, which takes long, has the identity of ``rule_facts``."""
SAMPLED_DATA = ("jsonl", "rule_facts", "labelled_jsonl", "preferences_jsonl", "image_folder", "audio_list")


def options() -> list[str]:
    """The shipped options of the hashed groups, e.g. ``optimizer=muon``."""
    return [f"{group}={file.stem}" for group in HASHED for file in sorted((CONF / group).glob("*.yaml"))]


def configuration_hashes(options: Iterable[str]) -> dict[str, str]:
    """By option: the hash of the run that it alone composes."""
    with hydra_session() as hydra:
        return {option: mathematics_hash(compose_in(hydra, [option]).config) for option in options}


def data_digests(names: Iterable[str], cache: Path) -> dict[str, list[str]]:
    """By name of :data:`DATA`: the digests of training and validation data; relative to the working folder."""
    digests = {}
    with hydra_session() as hydra:
        for name in names:
            words = [*DATA[name], f"data.cache_dir={cache}", "data.tokenize_workers=1"]
            if not any(word.startswith("data.validation") for word in words):
                words.append("data.validation_fraction=0.2")
            composition = compose_in(hydra, words)
            assert not composition.errors, composition.errors
            prepared = prepare(composition.config)
            digests[name] = [prepared.digest, prepared.validation_digest]
    return digests


OBJECTIVES = {
    "bert_tiny": "masked_lm",
    "clip_tiny": "contrastive",
    "llava_tiny": "vision_language",
    "paligemma_tiny": "vision_language",
    "qwen25_vl_tiny": "vision_language",
    "qwen3_vl_tiny": "vision_language",
    "smolvlm_tiny": "vision_language",
    "t5_tiny": "seq2seq",
    "vit_bert_tiny": "contrastive",
    "vit_tiny": "image_classification",
    "wav2vec2_tiny": "ctc",
    "whisper_tiny": "speech_seq2seq",
}
"""By shipped model, where it is not causal_lm."""
SAMPLED_MODELS = ("llama_tiny", "clip_tiny")


def tiny_models() -> list[str]:
    return [file.stem for file in sorted((CONF / "model").glob("*_tiny.yaml"))]


def parameters(models: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By shipped model: a hash of names and shapes, and the sum of the absolute weights that seed 7 draws."""
    from mgpu_pipe.config.objective import description
    from mgpu_pipe.models.build import build_meta, materialise

    tables = {}
    with hydra_session() as hydra:
        for name in models:
            config = compose_in(hydra, [f"model={name}"]).config
            meta = build_meta(config.model, description(OBJECTIVES.get(name, "causal_lm")).model_class)
            model = materialise(meta, 7, "cpu")
            shapes = {key: list(weight.shape) for key, weight in model.named_parameters()}
            text = json.dumps(shapes, sort_keys=True)
            weights = sum(weight.double().abs().sum().item() for weight in model.parameters())
            tables[name] = {"names": hashlib.sha256(text.encode()).hexdigest()[:16], "weights": weights}
    return tables


def random_numbers() -> dict[str, list[int]]:
    """The first values of each stream that a run draws from."""
    from mgpu_pipe.models.init.keyed_init import key_of
    from mgpu_pipe.parallel.random_streams import step_seed

    return {
        "order": GlobalOrder(1234, 1797).indices(1790, 14).tolist(),
        "sample": random_of(1234, 5).integers(0, 1 << 40, 3).tolist(),
        "split": [document_hash("a"), document_hash("a b")],
        "step": [step_seed(1234, step, place) for step, place in ((0, 0), (5, 0), (5, 3), (5, -1))],
        "weights": [key_of(1234, "model.embed_tokens.weight", 0, 0), key_of(1234, "lm_head.weight", "whole")],
    }
