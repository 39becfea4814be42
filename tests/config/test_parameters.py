"""The closed-form parameter counts. Oracle: the model itself, built by transformers on the meta device."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.compose import compose
from mgpu_pipe.launch.parameters import parameter_count
from mgpu_pipe.launch.preflight import model_fields

CASES = {
    "llama": ["model=llama_tiny"],
    "llama tied, biased": ["model=llama_tiny", "model.config.tie_word_embeddings=true",
                           "model.config.attention_bias=true", "model.config.mlp_bias=true"],
    "gpt2": ["model=gpt2_tiny"],
    "qwen3": ["model=qwen3_tiny"],
    "mixtral": ["model=mixtral_tiny"],
    "qwen3_moe with dense layers": ["model=qwen3_30b_a3b", "model.config.num_hidden_layers=4",
                                    "model.config.num_experts=4", "model.config.mlp_only_layers=[1]",
                                    "model.config.decoder_sparse_step=2"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_the_formula_counts_what_the_model_has(overrides: list[str]):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config, _ = compose(overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.model.type, **config.model.config))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(model_fields(config)) == expected


def test_an_unknown_family_gives_none():
    assert parameter_count({"model_type": "nothing"}) is None
    assert parameter_count({"model_type": "llama"}) is None
