"""Names of activation functions. Oracle: transformers' own table, and the models that it builds."""

from __future__ import annotations

import pytest
from transformers.activations import ACT2FN

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.activations import KNOWN, unknown_activations
from mgpu_pipe.models.build import build_meta


def test_the_known_names_are_those_of_transformers() -> None:
    assert set(ACT2FN) == KNOWN


def test_fields_of_parts_are_looked_at_and_other_texts_are_not() -> None:
    vision, text = {"hidden_act": "gelo", "pooler_act": "tanh"}, {"hidden_activation": "gelu"}
    fields = {"vision_config": vision, "text_config": text, "dense_act_fn": "rolu", "layer_types": ["x"], "action": "x"}
    found = list(unknown_activations(fields))
    assert found == [("model.config.vision_config.hidden_act", "gelo"), ("model.config.dense_act_fn", "rolu")]


def test_an_unknown_activation_is_refused_by_its_field() -> None:
    model = ModelConfig(type="gpt2", config={"n_layer": 1, "n_embd": 8, "n_head": 2, "activation_function": "gelu_nw"})
    refusal = r"model.config.activation_function=gelu_nw: .* no such activation function; did you mean gelu_new\?"
    with pytest.raises(ConfigError, match=refusal):
        build_meta(model)
