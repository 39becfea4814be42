"""Models whose tokens see those that they are to predict are refused by field or family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.checks.check_model import check_causality
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_types, resolved_fields
from tests.families.cells import Variant, not_tried, small
from tests.families.step import sees_later_tokens, whole_model

SEEING = [
    ("bert", {"is_decoder": False}, "model.config.is_decoder=false: .*; use model.config.is_decoder=true"),
    ("camembert", {}, "model.config.is_decoder=false"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "model.config.use_bidirectional_attention=true"),
    ("cpmant", {}, "model.type=cpmant"),
    ("doge", {"is_moe": True}, "model.config.is_moe=true: .*micro-batch.*; use model.config.is_moe=false"),
    ("xlm", {"causal": False}, "model.config.causal=false"),
]
FINE = [
    *(("bert", {"is_decoder": True}), ("gemma3_text", {}), ("llama", {}), ("xlm", {"causal": True})),
    *(("gpt_neox", {}), ("gpt_neox", {"is_decoder": False}), ("bart", {"is_decoder": False})),
]


def fields(family: str, given: dict[str, Any]) -> dict[str, Any]:
    return resolved_fields(ModelConfig(type=family, config=given))


@pytest.mark.parametrize(("family", "given", "said"), SEEING)
def test_what_sees_the_future_is_refused(family: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_causality(fields(family, given))


@pytest.mark.parametrize(("family", "given"), FINE)
def test_causal_models_are_not(family: str, given: dict[str, Any]) -> None:
    check_causality(fields(family, given))


def test_a_folder_that_says_so_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.config\.is_causal=false"):
        check_causality({**fields("llama", {}), "is_causal": False})


@pytest.mark.parametrize("family", ["bert", "gpt_neox"])
def test_what_the_check_says_is_measured(family: str) -> None:
    assert refused(family, {}) is measured(family, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [*families_with(lambda family: family.causal_if and family is not family_of("reformer")), "marian"]
)
def test_the_field_is_what_decides(family: str) -> None:
    name = family_of(family).causal_if or "is_decoder"
    for value in (False, True):
        assert refused(family, {name: value}) is measured(family, {name: value})


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", model_types())
def test_every_family_by_default_is_what_the_check_says(family: str) -> None:
    if reason := not_tried(family):
        pytest.skip(reason)
    try:
        seen = measured(family, {})
    except (BadInputError, AssertionError, AttributeError, ValueError) as error:
        pytest.skip(f"the defaults do not build: {error}")
    assert refused(family, {}) is seen


def refused(family: str, given: dict[str, Any]) -> bool:
    try:
        check_causality(fields(family, given))
    except ConfigError:
        return True
    return False


def measured(family: str, given: dict[str, Any]) -> bool:
    model = whole_model(small(Variant(family, given))).eval()
    return sees_later_tokens(model, torch.arange(3, 15))
