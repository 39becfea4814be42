"""The README.md of an export: what the run was, how to load it, and texts of others as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.inference.model_card import model_card, write_card
from mgpu_pipe.inference.open import StoredModel, open_model
from tests.inference.support import write_run, write_texts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    write_run(folder / "run", "llama", write_texts(folder / "texts", 12), folder / "cache")
    paths = RunPaths(folder / "run")
    paths.summary.write_text(json.dumps({"step": 3, "world_size": 2, "metrics": {"val/loss": 1.25}}))
    machine = {"gpus": ["NVIDIA H100, 81559 MiB, 570.1"] * 2, "cpu": {"model": "a CPU", "usable_cores": 2}}
    paths.environment.write_text(json.dumps({**json.loads(paths.environment.read_text()), **machine}))
    return folder / "run"


def rows_of(card: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and line != "| | |"]
    return {cells[0]: cells[1] for cells in lines}


def test_the_card_tells_the_run(run: Path) -> None:
    card = model_card(open_model(run), "small", "bf16")
    front, rows = yaml.safe_load(card.split("---")[1]), rows_of(card)
    assert front == {"library_name": "transformers", "tags": ["mgpu_pipe"]}
    assert rows["hardware"] == "2 x NVIDIA H100" and rows["weights"] == "bf16, safetensors"
    assert rows["steps"] == "3 of 5 samples of 32 tokens" and rows["objective"] == "causal_lm"
    assert rows["loss"] == "1.25" and "on 2 processes" in rows["strategy"]
    assert 'AutoModelForCausalLM.from_pretrained("small")' in card and "vllm serve small" in card
    assert str(run.parent) not in card


def test_texts_of_others_are_data(run: Path) -> None:
    paths = RunPaths(run)
    kept = paths.environment.read_text()
    evil = "[x](http://evil) | <img src=x> `y`\n# A heading"
    paths.environment.write_text(json.dumps({**json.loads(kept), "gpus": [], "cpu": {"model": evil}}))
    try:
        card = model_card(open_model(run), 'a"); import os #<b>', "fp32")
    finally:
        paths.environment.write_text(kept)
    assert "<img" not in card and "<b>" not in card and "\n# A heading" not in card
    assert r"\[x\](http://evil) \| &lt;img src=x> \`y\` # A heading" in card
    assert 'from_pretrained("a____import_os___b_")' in card


LOADERS = {
    BertModel: "SentenceTransformer",
    BertForMaskedLM: "AutoModelForMaskedLM.from_pretrained",
    BertForSequenceClassification: "AutoModelForSequenceClassification.from_pretrained",
}


@pytest.mark.parametrize(("model_class", "loader"), LOADERS.items())
def test_a_head_is_loaded_with_its_model(model_class: type[PreTrainedModel], loader: str, tmp_path: Path) -> None:
    """Also of a model that was trained from a folder of sentence-transformers, whose modules the export keeps."""
    (tmp_path / "modules.json").write_text("[]")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = model_class(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes))
    stored = StoredModel(model, dict(model.named_parameters()).__getitem__, tmp_path, None, None, None)
    write_card(stored, tmp_path, "out", "fp32")
    assert f'model = {loader}("out")' in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_every_export_writes_one(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are read by gguf: pip install gguf")
    for format, line in (("hf", 'from_pretrained("out-hf")'), ("gguf", "llama-server --model out-gguf/model.gguf")):
        out = tmp_path / f"out-{format}"
        assert main(["export", str(run), "--out", str(out), "--format", format]) == 0
        assert line in (out / "README.md").read_text() and rows_of((out / "README.md").read_text())["hardware"]
