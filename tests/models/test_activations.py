"""Names of activation functions. Oracle: transformers' own table, and the models that it builds."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.activations import ACT2FN

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models import activations
from mgpu_pipe.models.activations import KNOWN, check_activations, unknown_activations
from mgpu_pipe.models.build import build_meta


def test_the_known_names_are_those_of_transformers() -> None:
    assert set(ACT2FN) == KNOWN


def test_fields_of_parts_are_looked_at_and_other_texts_are_not() -> None:
    vision, text = {"hidden_act": "gelo", "pooler_act": "tanh"}, {"hidden_activation": "gelu"}
    fields = {"vision_config": vision, "text_config": text, "dense_act_fn": "rolu", "layer_types": ["x"], "action": "x"}
    found = unknown_activations(ModelConfig(type="clip", config=fields))
    assert found == [("model.config.vision_config.hidden_act", "gelo"), ("model.config.dense_act_fn", "rolu")]


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("gpt2", {"activation_function": "gelu_nw"}, "activation_function=gelu_nw"),
        ("clip", {"vision_config": {"hidden_act": "gelu_nw"}}, "vision_config.hidden_act=gelu_nw"),
    ],
)
def test_an_unknown_activation_is_refused_from_the_source(model_type: str, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.config.{key}: .* no such .*; did you mean gelu_new\?"):
        check_activations(ModelConfig(type=model_type, config=config))


def test_an_unknown_activation_is_refused_by_the_built_model() -> None:
    model = ModelConfig(type="gpt2", config={"n_layer": 1, "n_embd": 8, "n_head": 2, "activation_function": "gelu_nw"})
    with pytest.raises(ConfigError, match=r"model.config.activation_function=gelu_nw: .* did you mean gelu_new\?"):
        build_meta(model)


def test_a_name_that_the_family_itself_takes_is_left_to_the_built_model(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'act = Own() if config.hidden_act == "own" else ACT2FN[config.hidden_act]'
    monkeypatch.setattr(activations, "modeling_source", lambda model_type: (source, ""))
    check_activations(ModelConfig(type="llama", config={"hidden_act": "own"}))
    monkeypatch.setattr(activations, "modeling_source", lambda model_type: (source.partition("else")[2], ""))
    with pytest.raises(ConfigError, match="no such activation function"):
        check_activations(ModelConfig(type="llama", config={"hidden_act": "own"}))
