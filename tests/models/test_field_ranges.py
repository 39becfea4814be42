"""Numbers out of range are refused by ``check``; whole numbers are taken where a class declares floats."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import model_config
from mgpu_pipe.models.field_ranges import check_ranges
from mgpu_pipe.models.fields import config_fields, model_types


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.config.rms_norm_eps=-1e-6", "use a number of at least 0"),
        ("model.config.initializer_range=-1", r"use a number from 0\.0 to 1\.0"),
        ("model.config.initializer_range=3", r"use a number from 0\.0 to 1\.0"),
        ("model.config.attention_dropout=1.5", "use a probability, from 0 to 1"),
        ("model.config.pad_token_id=1024", "the model's vocabulary has 1024 tokens; use an id below 1024"),
        ("model.config.head_dim=7", "rotary positions turn pairs of them; use 6 or 8"),
        ("model.config.head_dim=null model.config.hidden_size=72", r"set model\.config\.head_dim=10 too"),
    ],
)
def test_a_number_out_of_range_is_named(word: str, said: str) -> None:
    with pytest.raises(ConfigErrors, match=said):
        check_ranges(compose(["model=llama_tiny", *word.split()])[0].model)


def test_a_part_of_a_model_has_ranges_too() -> None:
    words = ["model=llava_tiny", "model.config.vision_config.layer_norm_eps=-1"]
    with pytest.raises(ConfigErrors, match=r"model\.config\.vision_config\.layer_norm_eps=-1: use a number"):
        check_ranges(compose(words)[0].model)


@pytest.mark.parametrize("word", ["model=llama_tiny rms_norm_eps=1", "model=llava_tiny vision_config.layer_norm_eps=1"])
def test_a_whole_number_is_taken_for_a_float(word: str) -> None:
    preset, setting = word.split()
    config = model_config(compose([preset, f"model.config.{setting}"])[0].model)
    eps = config.rms_norm_eps if preset == "model=llama_tiny" else config.vision_config.layer_norm_eps
    assert eps == 1.0 and type(eps) is float


def test_odd_heads_are_refused_where_transformers_refuses_them() -> None:
    refused = 0
    for family in model_types():
        if "head_dim" not in (config_fields(family) or ()):
            continue
        try:
            check_ranges(ModelConfig(type=family, config={"head_dim": 7}))
        except ConfigErrors:
            refused += 1
            with pytest.raises((StrictDataclassError, ValueError), match="even rotary dimension"):
                AutoConfig.for_model(family, head_dim=7)
    assert refused > 50
