"""Masked language models take documents' starts in the place of a mask, where they can."""

from __future__ import annotations

import copy

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.masked_lm import MaskedLMObjective
from mgpu_pipe.objectives.text_keys import MaskedLMConfig

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 101, "max_position_embeddings": 80, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0},
}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_step_is_that_with_the_mask(family: str) -> None:
    plain = materialise(build_meta(ModelConfig(type=family, config=SMALL), "AutoModelForMaskedLM"), 3, "cpu")
    by_starts = copy.deepcopy(plain)
    assert use_packed_attention(by_starts)
    found = []
    for model in (plain, by_starts):
        objective = MaskedLMObjective(model, None, lambda _: 1.0, MaskedLMConfig(mask_token_id=4))
        batch = objective.random_batch(1, 0, 4, 48, True)
        loss = objective.micro_batch_loss({**batch, **objective.host_inputs(batch)})
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (other, others) = found
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)


def test_windows_to_both_sides_are_left_to_the_mask() -> None:
    fields = {**SMALL, "num_hidden_layers": 3, "attention_dropout": 0.0}
    del fields["hidden_dropout_prob"], fields["attention_probs_dropout_prob"], fields["vocab_size"]
    assert not use_packed_attention(build_meta(ModelConfig(type="modernbert", config=fields), "AutoModelForMaskedLM"))
