"""Sizes of 0 in a model's configuration are refused; the oracle of the exceptions is transformers' own code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from mgpu_pipe.architectures.config_source import NO_DEFAULT, config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.field_sizes import EXPERTS, EXPERTS_MAY_BE_ZERO, largest_width
from mgpu_pipe.models.fields import check_model_config, resolved_fields

MODELS = Path(transformers.__file__).parent / "models"


@pytest.mark.parametrize(
    ("model_type", "config", "said"),
    [
        ("gpt2", {"n_inner": 0}, "n_inner=0: a model has some; use at least 1, or null"),
        ("gpt2", {"n_embd": 0}, "n_embd=0: a model has some; use at least 1"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size=0: a model has some; use at least 1"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0: a model has some; use at least 1"),
        ("mixtral", {"num_local_experts": -2}, "num_local_experts=-2: a model has some; use at least 1"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0: a model has some; use at least 1, or null"),
        ("whisper", {"num_mel_bins": 0}, "num_mel_bins=0: a model has some"),
        ("gpt2", {"n_positions": -5}, "n_positions=-5: a model has some; use at least 1"),
        ("wav2vec2", {"conv_dim": [8, 0]}, "conv_dim=[8, 0]: a model has some; use at least 1"),
        (
            "llava",
            {"vision_config": {"model_type": "clip_vision_model", "patch_size": 0}},
            "vision_config.patch_size=0",
        ),
    ],
)
def test_a_size_of_zero_is_named(model_type: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(f"model.config.{said}")):
        check_model_config(ModelConfig(type=model_type, config=config))


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3_moe", {"num_experts": 0, "moe_intermediate_size": 0}),
        ("deepseek_v3", {"n_shared_experts": 0, "first_k_dense_replace": 0}),
        ("deepseek_v2", {"q_lora_rank": 0}),
        ("mistral", {"sliding_window": 0}),
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 0}),
        ("gemma3n_text", {"hidden_size_per_layer_input": 0}),
        ("deberta", {"type_vocab_size": 0}),
        ("bert", {"chunk_size_feed_forward": 0}),
    ],
)
def test_a_zero_that_means_none_is_taken(model_type: str, config: dict[str, Any]) -> None:
    check_model_config(ModelConfig(type=model_type, config=config))


def test_families_without_experts_are_those_whose_code_asks() -> None:
    asks = re.compile(r"num_(?:local_)?experts (?:> [01]|== 0)")
    sources = MODELS.glob("*/modeling_*.py")
    found = {path.parent.name for path in sources if asks.search(path.read_text(encoding="utf-8"))}
    named = {re.sub(r"_(?:talker_)?text$", "", name) for name in EXPERTS_MAY_BE_ZERO}
    assert found - {"vitpose_backbone"} == named


def test_names_of_exceptions_have_a_number_of_experts() -> None:
    for name in EXPERTS_MAY_BE_ZERO:
        known = config_class(name)
        assert known is not None, name
        assert [field for field in EXPERTS if known.defaults.get(field, NO_DEFAULT) is not NO_DEFAULT], name


def test_the_largest_width_counts_parts_and_no_vocabulary() -> None:
    llama = ModelConfig(type="llama", config={"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4})
    assert largest_width(resolved_fields(llama)) == 160
    assert largest_width({"hidden_size": 8, "vision_config": {"hidden_size": 32}, "vocab_size": 99}) == 32
