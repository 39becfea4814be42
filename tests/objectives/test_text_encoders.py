"""Families of text encoders. Oracle: transformers' own model, one text at a time, without masks and given positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.objectives.packed_text import is_first_document
from mgpu_pipe.objectives.text_keys import MaskedLMConfig
from mgpu_pipe.objectives.text_vectors import pool, present_rows
from tests.models.tiny import tiny_model

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


@pytest.mark.parametrize("family", families_in_role("text_encoder"))
def test_a_text_has_the_same_vector_alone_and_in_a_batch(family: str) -> None:
    model, texts = tiny_encoder(family, "AutoModel"), texts_of(*LENGTHS)
    ids = torch.ones(len(texts), 1, 40, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, 0, : len(text)] = text
    _, inputs = present_rows({"input_ids": ids, "lengths": torch.tensor(LENGTHS)[:, None]})
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
        alone = [model(input_ids=text[None]).last_hidden_state[0] for text in texts]
    wanted = {
        "mean": [states.mean(0) for states in alone],
        "cls": [states[0] for states in alone],
        "last_token": [states[-1] for states in alone],
    }
    for pooling, vectors in wanted.items():
        found = pool(hidden, inputs["attention_mask"], pooling)
        torch.testing.assert_close(found, torch.stack(vectors), rtol=1e-5, atol=1e-6)


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
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    total = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    for name, parameter in ours.named_parameters():
        if parameter.grad is None:
            assert name not in gradients
            continue
        assert float((parameter.grad - gradients[name]).norm()) <= 1e-5 * float(gradients[name].norm()) + 1e-7 * total


def test_the_first_document_of_a_row_is_all_but_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert is_first_document(positions).sum(1).tolist() == [3, 1, 5]
