"""Text encoders, and decoders as encoders. Oracle: transformers' own model, one text at a time, without masks and given
positions; sentence-transformers for an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.find import families_in_role, families_with
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.objectives.packed_text import is_first_document
from mgpu_pipe.objectives.text_keys import MaskedLMConfig
from mgpu_pipe.objectives.text_vectors import pool, present_rows
from tests.models.tiny import tiny_model
from tests.objectives.harness import check_gradients, check_loss, gradients_of
from tests.support.command import mgpu, run_folder
from tests.support.embedding_pairs import write_pairs
from tests.support.sampling import one_in

MORE: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        **{"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]},
        **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
        **{"type_vocab_size": 0},
    },
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "electra": {"embedding_size": 32},
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2},
}
"""Fields as published models have them, with windows and buckets that the texts of the tests outgrow."""
LENGTHS = (17, 3, 30, 9)


def tiny_encoder(family: str, model_class: str) -> Any:
    model: Any = materialise(build_meta(encoder_config(family), model_class), 3, "cpu")
    return model.eval()


def encoder_config(family: str) -> ModelConfig:
    return tiny_model(family, **{"pad_token_id": 1, **MORE.get(family, {})})


def texts_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(5, 128, (length,), generator=generator) for length in lengths]


def together_and_alone(model: Any, padding: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A batch of texts as inputs, and the vector of each text alone by its pooling."""
    texts = texts_of(*LENGTHS)
    ids = torch.full((len(texts), 1, 40), padding)
    for row, text in enumerate(texts):
        ids[row, 0, : len(text)] = text
    _, inputs = present_rows({"input_ids": ids, "lengths": torch.tensor(LENGTHS)[:, None]})
    with torch.no_grad():
        alone = [model(input_ids=text[None]).last_hidden_state[0] for text in texts]
    pooled = {"mean": [states.mean(0) for states in alone], "cls": [states[0] for states in alone]}
    pooled["last_token"] = [states[-1] for states in alone]
    return inputs, {pooling: torch.stack(vectors) for pooling, vectors in pooled.items()}


@pytest.mark.parametrize("family", families_in_role("text_encoder"))
def test_a_text_has_the_same_vector_alone_and_in_a_batch(family: str) -> None:
    model = tiny_encoder(family, "AutoModel")
    inputs, alone = together_and_alone(model, 1)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    for pooling, vectors in alone.items():
        torch.testing.assert_close(pool(hidden, inputs["attention_mask"], pooling), vectors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", families_in_role("text_encoder"))
def test_hidden_tokens_of_packed_texts_are_learned_as_those_of_each_text(family: str) -> None:
    """Loss and every gradient. DeBERTa's rows have one text each."""
    ours, plain = (tiny_encoder(family, "AutoModelForMaskedLM") for _ in range(2))
    packs = family != "deberta-v2"
    texts = texts_of(*LENGTHS)
    labels = [text.where(torch.arange(len(text)) % 4 == 1, IGNORE_INDEX) for text in texts]
    rows = [[0, 1], [2, 3]] if packs else [[text] for text in range(len(texts))]
    width = 40
    batch = {
        "input_ids": torch.ones(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), IGNORE_INDEX),
        "position_ids": torch.zeros(len(rows), width, dtype=torch.int64),
    }
    for row, members in enumerate(rows):
        start = 0
        for text in members:
            stop = start + len(texts[text])
            batch["input_ids"][row, start:stop] = texts[text]
            batch["labels"][row, start:stop] = labels[text]
            batch["position_ids"][row, start:stop] = torch.arange(stop - start)
            start = stop
        batch["position_ids"][row, start:] = torch.arange(width - start)
    use_packed_attention(ours)
    objective = MaskedLMObjective(ours, None, lambda _: 1.0, MaskedLMConfig(mask_token_id=4, loss_chunk_tokens=7))
    loss = objective.micro_batch_loss(batch)
    loss.backward()
    losses = [
        F.cross_entropy(plain(input_ids=text[None]).logits[0], wanted, ignore_index=IGNORE_INDEX, reduction="sum")
        for text, wanted in zip(texts, labels, strict=True)
    ]
    expected = torch.stack(losses).sum()
    expected.backward()
    check_loss(loss.detach(), expected, 1e-6)
    wanted, found = gradients_of(plain), gradients_of(ours)
    assert [name for name in wanted if wanted[name] is None] == [name for name in found if found[name] is None]
    check_gradients(ours, wanted, each=1e-5, whole=1e-7)


def test_the_first_document_of_a_row_is_all_but_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert is_first_document(positions).sum(1).tolist() == [3, 1, 5]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("family", families_with(lambda family: family.bidirectional))
def test_a_text_has_the_same_vector_of_a_decoder_alone_and_in_a_batch(family: str, bidirectional: bool) -> None:
    config = tiny_model(family)
    config.bidirectional = bidirectional
    model: Any = materialise(build_meta(config, "AutoModel"), 3, "cpu").eval()
    inputs, alone = together_and_alone(model, 0)
    with torch.no_grad():
        for packed in (False, True):
            assert not packed or use_packed_attention(model)
            hidden = model(**inputs).last_hidden_state
            for pooling in ("mean", "last_token"):
                found = pool(hidden, inputs["attention_mask"], pooling)
                torch.testing.assert_close(found, alone[pooling], rtol=1e-5, atol=1e-6)
        changed = texts_of(*LENGTHS)[0]
        changed[-1] = 4
        first = model(input_ids=changed[None]).last_hidden_state[0, 0]
    assert (not torch.equal(first, alone["cls"][0])) is bidirectional


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "is_causal"),
    one_in(
        2,
        [
            ("qwen3_tiny model.bidirectional=true objective.pooling=last_token peft=lora", False),
            ("llama_tiny model.bidirectional=true objective.pooling=mean", False),
            ("llama_tiny objective.pooling=last_token", None),
            ("bert_tiny objective.pooling=mean peft=lora peft.targets=[query,value,dense]", None),
        ],
    ),
)
def test_sentence_transformers_gives_the_vectors_of_decoders_and_of_adapters(
    tmp_path: Path, words: str, is_causal: bool | None
) -> None:
    """Adapters of a run are merged; the exported folder says whether its tokens see those after them."""
    library = pytest.importorskip(
        "sentence_transformers", reason="it loads the folder: pip install sentence-transformers"
    )
    given = ("objective=text_embedding", "data=embedding_pairs", "data.seq_len=24", "model.config.vocab_size=384")
    file = f"data.paths=[{write_pairs(tmp_path / 'pairs.jsonl')}]"
    chosen = (*f"model={words}".split(), *(["model.config.tie_word_embeddings=false"] * ("bert" not in words)))
    steps = ("strategy=single", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=2")
    run = run_folder(mgpu(tmp_path / "cache", tmp_path, *given, file, *chosen, *steps))
    folder, texts = tmp_path / "exported", ["question 1", "answer 2 says 4", "a"]
    assert main(["export", str(run), "--out", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text()).get("is_causal") is is_causal
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source, name in ((run, "run.npy"), (folder, "folder.npy")):
        out = tmp_path / name
        assert main(["encode", str(source), "--input", str(tmp_path / "texts.jsonl"), "--output", str(out)]) == 0
    ours = np.load(tmp_path / "run.npy")
    published = library.SentenceTransformer(str(folder), device="cpu")
    together, alone = published.encode(texts), np.concatenate([published.encode([text]) for text in texts])
    for vectors in (np.load(tmp_path / "folder.npy"), together, alone):
        np.testing.assert_allclose(vectors, ours, atol=1e-6)
