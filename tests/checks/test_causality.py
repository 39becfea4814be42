"""Models whose tokens see those that they are to predict are refused by field or family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.checks.causality import check_causality
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import resolved_fields
from tests.models.tiny import tiny_model

SEEING = [
    ("bert", {"is_decoder": False}, "model.config.is_decoder=false: .*; use model.config.is_decoder=true"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "model.config.use_bidirectional_attention=true"),
    ("cpmant", {}, "model.type=cpmant"),
    ("doge", {"is_moe": True}, "model.config.is_moe=true: .*micro-batch.*; use model.config.is_moe=false"),
    ("xlm", {"causal": False}, "model.config.causal=false"),
]
FINE = [("bert", {"is_decoder": True}), ("gemma3_text", {}), ("llama", {}), ("xlm", {"causal": True})]


def fields(family: str, given: dict[str, Any]) -> dict[str, Any]:
    return resolved_fields(ModelConfig(type=family, config=given))


@pytest.mark.parametrize(("family", "given", "said"), SEEING)
def test_what_sees_the_future_is_refused(family: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_causality(fields(family, given))


@pytest.mark.parametrize(("family", "given"), FINE)
def test_causal_models_are_not(family: str, given: dict[str, Any]) -> None:
    check_causality(fields(family, given))


@pytest.mark.parametrize(
    ("family", "given", "sees"), [("bert", {"is_decoder": False}, True), ("bert", {"is_decoder": True}, False)]
)
def test_the_field_is_what_decides(family: str, given: dict[str, Any], sees: bool) -> None:
    model = materialise(build_meta(tiny_model(family, **given)), 1, "cpu").eval()
    ids = torch.randint(3, 100, (1, 8))
    with torch.no_grad():
        whole, part = model(input_ids=ids).logits, model(input_ids=ids[:, :5]).logits
    assert (not torch.allclose(whole[:, :5], part, rtol=1e-4, atol=1e-5)) is sees
