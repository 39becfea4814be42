"""Ids outside of an export's vocabulary: left out of its configuration, and named where its tokenizer writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, LlamaConfig

from mgpu_pipe.cli.verbs.export import _print_ids_without_rows
from mgpu_pipe.models.weights.model_files import write_configuration


def test_a_first_token_outside_of_the_vocabulary_is_left_out(tmp_path: Path):
    text = {
        "vocab_size": 40,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = CLIPConfig(text_config={**text, "eos_token_id": 5}, vision_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = CLIPModel(config)
    write_configuration(model, tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, 5)
    assert config.text_config.bos_token_id == 49406, "the run's own is left alone"


def test_ids_without_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": [{"id": 2, "content": "<x>"}]})
    )
    _print_ids_without_rows(tmp_path, LlamaConfig(vocab_size=2))
    assert "1 tokens that the model has no row for (its vocabulary has 2), the first is 2 ('<x>')" in (
        capsys.readouterr().out
    )
    _print_ids_without_rows(tmp_path, LlamaConfig(vocab_size=3))
    assert capsys.readouterr().out == ""
