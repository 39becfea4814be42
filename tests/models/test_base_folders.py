"""Folders of models without a head, as published ones often are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    SamConfig,
    ViTConfig,
    ViTModel,
)

from mgpu_pipe.cli.main import main
from mgpu_pipe.cli.verbs.eval import _evaluation_config
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.text.embedding_rows import EmbeddingPairsConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.inference.open import load_run, open_model
from mgpu_pipe.models.fields import check_model_config
from mgpu_pipe.models.weights.folder import ModelFolderError
from mgpu_pipe.models.weights.pretrained import load_pretrained
from tests.inference.support import VOCABULARY, write_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def stored(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return stored(GPT2Model(GPT2Config(vocab_size=VOCABULARY, **sizes, **ids)), folder)


def test_tied_weights_without_a_head_are_a_causal_language_model(tmp_path: Path) -> None:
    run = load_run(gpt2(tmp_path / "gpt2"))
    assert type(run.model).__name__ == type(open_model(run.source).model).__name__ == "GPT2LMHeadModel"
    assert _evaluation_config(run, []).objective.name == "causal_lm"


def test_tied_weights_without_a_head_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tokenizer(gpt2(tmp_path / "gpt2"))
    assert main(["generate", str(folder), "--prompt", "the quick", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_untied_weights_without_a_head_make_vectors_and_continue_nothing(tmp_path: Path) -> None:
    folder = stored(LlamaModel(LlamaConfig(vocab_size=64, **SIZES)), tmp_path / "llama")
    assert type(load_run(folder).model) is LlamaModel
    with pytest.raises(ModelFolderError, match=r"missing: lm_head\.weight"):
        load_pretrained(ModelConfig(path=str(folder)), torch.device("cpu"), model_class="AutoModelForCausalLM")


def test_a_family_that_is_trained_without_a_head_has_none(tmp_path: Path) -> None:
    run = load_run(stored(BertModel(BertConfig(vocab_size=64, **SIZES)), tmp_path / "bert"))
    assert isinstance(run.model, BertModel)
    assert _evaluation_config(run, []).objective.name == "text_embedding"
    assert _evaluation_config(run, ["data=scored_pairs", "data.paths=[a]"]).objective.name == "text_similarity"


def test_the_data_tell_what_a_classifier_is_evaluated_for(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, num_labels=1, **SIZES)  # type: ignore[call-arg]
    run = load_run(stored(BertForSequenceClassification(config), tmp_path / "bert"))
    for source, objective in (
        ("embedding_pairs", "reranker"),
        ("preferences_jsonl", "reward"),
        ("labelled_jsonl", "sequence_classification"),
    ):
        assert _evaluation_config(run, [f"data={source}", "data.paths=[a]"]).objective.name == objective


def test_a_type_that_no_objective_trains_is_refused(tmp_path: Path) -> None:
    SamConfig(architectures=["SamModel"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers has no causal language model sam"):
        check_model_config(ModelConfig(path=str(tmp_path)))


def test_a_model_of_pictures_without_a_head_has_none(tmp_path: Path) -> None:
    folder = stored(ViTModel(ViTConfig(image_size=32, **SIZES)), tmp_path / "vit")
    assert isinstance(load_run(folder).model, ViTModel)


def test_vectors_of_a_folder_are_evaluated_by_its_files(tmp_path: Path) -> None:
    folder = stored(BertModel(BertConfig(vocab_size=64, **SIZES)), tmp_path / "bert")
    run = load_run(folder)
    keys = description("text_embedding").keys(pooling="last_token", normalize=False)
    given = EmbeddingPairsConfig(query_prompt="find: ", document_prompt="text: ")
    (folder / "1_Pooling").mkdir()
    for name, content in keys.folder_files(given, 16).items():
        (folder / name).write_text(json.dumps(content))
    words = ["data=embedding_pairs", "data.paths=[a.jsonl]", "data.document_prompt='other: '"]
    config: Any = _evaluation_config(run, words)
    assert (config.objective.pooling, config.objective.normalize) == ("last_token", False)
    assert (config.data.query_prompt, config.data.document_prompt) == ("find: ", "other: ")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    config = _evaluation_config(run, words)
    assert config.objective.pooling == "cls"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(BadInputError, match="text_embedding has no max_tokens; measure it with"):
        _evaluation_config(run, words)
