"""Decoders as embedders. Oracle: transformers' model, one text at a time; sentence-transformers for an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.architectures.find import families_with
from mgpu_pipe.cli.main import main
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.text_vectors import pool, present_rows
from tests.models.tiny import tiny_model
from tests.objectives.test_text_encoders import LENGTHS, texts_of
from tests.support.command import mgpu, run_folder
from tests.support.embedding_pairs import write_pairs


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("family", families_with(lambda family: family.bidirectional))
def test_a_text_has_the_same_vector_alone_and_in_a_batch(family: str, bidirectional: bool) -> None:
    config = tiny_model(family)
    config.bidirectional = bidirectional
    model: Any = materialise(build_meta(config, "AutoModel"), 3, "cpu").eval()
    texts = texts_of(*LENGTHS)
    ids = torch.zeros(len(texts), 1, 40, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, 0, : len(text)] = text
    _, inputs = present_rows({"input_ids": ids, "lengths": torch.tensor(LENGTHS)[:, None]})
    with torch.no_grad():
        alone = [model(input_ids=text[None]).last_hidden_state[0] for text in texts]
        for packed in (False, True):
            assert not packed or use_packed_attention(model)
            hidden = model(**inputs).last_hidden_state
            for pooling, wanted in (
                ("mean", [states.mean(0) for states in alone]),
                ("last_token", [states[-1] for states in alone]),
            ):
                found = pool(hidden, inputs["attention_mask"], pooling)
                torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-5, atol=1e-6)
        changed = texts[0].clone()
        changed[-1] = 4
        first = model(input_ids=changed[None]).last_hidden_state[0, 0]
    assert (not torch.equal(first, alone[0][0])) is bidirectional


VECTORS = "objective=text_embedding data=stdlib_pairs"


@pytest.mark.slow
def test_sentence_transformers_gives_the_vectors_of_a_decoder_that_sees_both_ways(tmp_path: Path) -> None:
    """Adapters of a run are merged; the exported folder says that its tokens see those after them."""
    library = pytest.importorskip("sentence_transformers", reason="loads the exported folder")
    given = ("objective=text_embedding", "objective.pooling=last_token", "data=embedding_pairs", "data.seq_len=24")
    file = f"data.paths=[{write_pairs(tmp_path / 'pairs.jsonl')}]"
    shape = ("model=qwen3_tiny", "model.config.vocab_size=384", "model.config.tie_word_embeddings=false")
    small = (*shape, "model.bidirectional=true", "peft=lora")
    steps = ("strategy=single", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=2")
    run = run_folder(mgpu(tmp_path / "cache", tmp_path, *given, file, *small, *steps))
    folder, texts = tmp_path / "exported", ["question 1", "answer 2 says 4", "a"]
    assert main(["export", str(run), "--out", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text())["is_causal"] is False
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source, name in ((run, "run.npy"), (folder, "folder.npy")):
        out = tmp_path / name
        assert main(["encode", str(source), "--input", str(tmp_path / "texts.jsonl"), "--output", str(out)]) == 0
    ours = np.load(tmp_path / "run.npy")
    published = library.SentenceTransformer(str(folder), device="cpu")
    together, alone = published.encode(texts), np.concatenate([published.encode([text]) for text in texts])
    for vectors in (np.load(tmp_path / "folder.npy"), together, alone):
        np.testing.assert_allclose(vectors, ours, atol=1e-6)
