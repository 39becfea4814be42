"""Exported text embeddings. Oracle: the vectors of sentence-transformers, which loads the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, RobertaConfig, RobertaModel

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig
from mgpu_pipe.inference.streamed_weights import compute_logits, probe
from mgpu_pipe.objectives.text_embedding import TextEmbeddingObjective
from mgpu_pipe.objectives.vector_keys import Pooling, TextEmbeddingConfig
from tests.support.command import mgpu, run_folder
from tests.support.embedding_pairs import write_pairs

REASON = "sentence-transformers loads the exported folder: pip install sentence-transformers"
PROMPTS = ("data.query_prompt='find: '", "data.document_prompt='text: '")


def test_sentence_transformers_gives_the_vectors_of_the_run(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    given = ("objective=text_embedding", "objective.pooling=cls", "data=embedding_pairs", "data.seq_len=12", *PROMPTS)
    file = f"data.paths=[{write_pairs(tmp_path / 'pairs.jsonl')}]"
    small = ("model=bert_tiny", "model.config.vocab_size=384", "strategy=single", "trainer.accelerator=cpu")
    out = mgpu(tmp_path / "cache", tmp_path, *given, file, *small, "trainer.max_steps=2", "trainer.devices=1")
    folder = tmp_path / "exported"
    said = mgpu(tmp_path / "cache", tmp_path, "export", str(run_folder(out)), "--out", str(folder))
    assert f'load it: sentence_transformers.SentenceTransformer("{folder}")' in said
    published = library.SentenceTransformer(str(folder), device="cpu")
    assert published.max_seq_length == 12 and published.similarity_fn_name == "cosine"
    vectors, texts = run_vectors(folder, tmp_path)
    assert any(len(text) > 40 for text in texts["document"]), "no text is cut"
    for kind, rows in texts.items():
        found = published.encode(rows, prompt_name=kind)
        np.testing.assert_allclose(found, vectors[kind], atol=1e-6)


def run_vectors(folder: Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Vectors of the objective for some queries and documents, one longer than a row, and these texts."""
    rows = [
        {"query": f"question {at}", "positive": f"answer {at} " + "and so on " * (8 * (at == 2))} for at in range(4)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = EmbeddingPairsConfig(
        source="embedding_pairs",
        paths=[str(file)],
        seq_len=12,
        tokenizer=str(folder),
        validation_fraction=0.0,
        query_prompt="find: ",
        document_prompt="text: ",
        cache_dir=str(tmp_path / "cache"),
    )
    config = RunConfig(data=data)
    config.model.path = str(folder)
    samples = prepare(config).open(config, "train")
    every = np.arange(len(rows))
    keys = TextEmbeddingConfig(pooling="cls")
    objective = TextEmbeddingObjective(AutoModel.from_pretrained(folder), None, lambda _: 1.0, keys)
    with torch.no_grad():
        features = objective.encode(samples.batch(every, every))
    vectors = {"query": features["queries"].numpy() / keys.scale, "document": features["documents"][:, 0].numpy()}
    return vectors, {"query": [row["query"] for row in rows], "document": [row["positive"] for row in rows]}


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_the_files_name_pooling_length_and_scores(pooling: Pooling) -> None:
    data = EmbeddingPairsConfig(seq_len=40)
    files = description("text_embedding").keys(pooling=pooling, normalize=False).folder_files(data, 64)
    modes = [name for name, value in files["1_Pooling/config.json"].items() if value is True]
    names = {"mean": "mean_tokens", "cls": "cls_token", "last_token": "lasttoken"}
    assert modes == [f"pooling_mode_{names[pooling]}", "include_prompt"]
    assert [module["path"] for module in files["modules.json"]] == ["", "1_Pooling"]
    assert files["sentence_bert_config.json"]["max_seq_length"] == 40
    assert files["config_sentence_transformers.json"]["similarity_fn_name"] == "dot"


def test_data_of_a_plug_in_without_prompts_gives_empty_ones() -> None:
    files = description("text_embedding").keys().folder_files(RunConfig().data, 64)
    assert files["config_sentence_transformers.json"]["prompts"] == {"query": "", "document": ""}


def test_few_positions_hold_the_text_by_which_an_export_is_checked() -> None:
    """RoBERTa's first token is at position ``pad_token_id + 1``."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = RobertaModel(RobertaConfig(vocab_size=99, max_position_embeddings=26, pad_token_id=1, **sizes))
    assert compute_logits(model, probe(model)).shape[1] == 24
