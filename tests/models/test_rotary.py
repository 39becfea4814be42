"""Rotary tables that depend on the length: the oracle is transformers' own, for a text of ``data.seq_len`` tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.rotary import fix_rotary_length, length_at_hand
from tests.models.tiny import tiny_model

BORDER, SEQ_LEN = 8, 16
WIDTH = 8
"""Frequencies of a head of 16."""


def model_with(kind: dict[str, Any], family: str = "llama") -> Any:
    own = {"original_max_position_embeddings": BORDER} if family == "phi3" else {}
    rope = {"rope_theta": 10000.0, **kind}
    config: ModelConfig = tiny_model(family, max_position_embeddings=64, rope_parameters=rope, **own)
    model = materialise(build_meta(config), 1, "cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # makes attention matter: at initialisation it is nearly uniform
    return model


LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": BORDER,
    "short_factor": [1.0] * WIDTH,
    "long_factor": [4.0] * WIDTH,
}
ALWAYS_LONG = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}


def logits(model: Any, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_document_has_the_same_logits_alone_in_a_pair_and_in_a_pack(family: str) -> None:
    model, oracle = model_with(LONGROPE, family), model_with(ALWAYS_LONG, family)
    fix_rotary_length(model, SEQ_LEN)
    ids = torch.randint(3, 100, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    short = BORDER - 3
    packed = torch.cat([torch.arange(short), torch.arange(SEQ_LEN - short)])
    positions = torch.stack([torch.arange(SEQ_LEN), packed])
    expected = [logits(oracle, ids[:1]), logits(oracle, ids[1:, :short]), logits(oracle, ids[1:, short:])]
    pair = logits(model, ids, positions)
    alone = logits(model, ids[1:], packed[None])
    cut = torch.stack([ids[1, :short], ids[0, :short]])
    for found in (pair[1:, :short], alone[:, :short], logits(model, cut)[:1]):
        assert error(found, expected[1]) < 1e-5
    assert error(pair[:1], expected[0]) < 1e-5
    assert error(pair[1:, short:], expected[2]) < 1e-5


def test_runs_of_short_samples_have_the_short_factors() -> None:
    model = model_with(LONGROPE)
    ids = torch.randint(3, 100, (2, BORDER))
    expected = logits(model, ids)
    fix_rotary_length(model, BORDER)
    assert torch.equal(logits(model, ids), expected)


def test_generation_takes_each_text_by_its_own_length() -> None:
    model = model_with(LONGROPE)
    ids = torch.randint(3, 100, (1, BORDER - 2))
    expected = logits(model, ids)
    fix_rotary_length(model, SEQ_LEN)
    assert not torch.allclose(logits(model, ids), expected)
    with length_at_hand(model):
        assert torch.equal(logits(model, ids), expected)


def test_dynamic_scaling_keeps_nothing_of_the_micro_batch_before() -> None:
    model = model_with({"rope_type": "dynamic", "factor": 2.0})
    fix_rotary_length(model, 96)  # beyond the 64 positions of the model
    ids = torch.randint(3, 100, (1, 12))
    before = logits(model, ids)
    logits(model, torch.randint(3, 100, (1, 90)))
    assert torch.equal(logits(model, ids), before)
