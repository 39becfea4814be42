"""model.type and model.config.* are checked against transformers' own classes; the oracle is the classes themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.build import build_meta, model_config
from mgpu_pipe.models.fields import check_model_config, class_of, config_fields, model_types, resolved_fields

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "falcon", "opt"])
def test_fields_are_those_of_the_configuration_class(family: str) -> None:
    config = AutoConfig.for_model(family)
    public = {name for name in vars(config) if not name.startswith("_")} - {"dtype"}
    known = config_fields(family)
    assert known is not None
    assert public - known <= {"ignore_keys_at_rope_validation", "model_type"}
    assert set(type(config).attribute_map) <= known
    read_by_name = {"rope_scaling", "rope_theta", "partial_rotary_factor", "experts_implementation", "per_layer_config"}
    if family in ("llama", "gpt2", "qwen3", "mixtral"):
        assert {name for name in known if not hasattr(config, name)} <= read_by_name


def test_every_causal_language_model_has_readable_fields() -> None:
    types = model_types()
    assert {"llama", "gpt2", "qwen3", "mixtral"} <= set(types)
    assert len(types) > 150
    assert [name for name in types[::6] if not config_fields(name)] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hiden_layers": 3}, "did you mean model.config.num_hidden_layers?"),
        ({"hidden_size": "wide"}, "model.config.hidden_size=wide: wrong type; give a whole number"),
        ({"tie_word_embeddings": 1}, "give true or false"),
        ({"vocab_size": None}, "model.config.vocab_size=null"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "divisor of 8"),
        ({"hidden_size": 100, "num_attention_heads": 8, "num_key_value_heads": 8}, "use 96"),
        ({"hidden_size": 100, "head_dim": 8, "num_attention_heads": 8, "num_key_value_heads": 8}, "use 96"),
        ({"num_hidden_layers": -1}, "the number is below 0; use at least 0"),
        ({"rope_parameters": {"rope_thta": 1e4}}, "did you mean rope_theta?"),
        ({"dtype": "bfloat16"}, "precision=bf16"),
        ({"attn_implementation": "eager"}, "model.attn_implementation"),
        ({"temperature": 0.5}, "no such field"),
    ],
)
def test_a_wrong_field_is_named_with_its_fix(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_model_config(ModelConfig(type="llama", config=config))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_errors_come_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_model_config(ModelConfig(type="llama", config={"num_hiden_layers": 3, "hidden_size": "a"}))
    assert len(caught.value.errors) == 2


def test_wrong_types_of_model() -> None:
    for model, message in (
        (ModelConfig(type="lama"), "did you mean llama?"),
        (ModelConfig(), "model=llama_tiny"),
        (ModelConfig(type="llama", path="x"), "leave it out"),
    ):
        with pytest.raises((ConfigError, ConfigErrors), match=message.replace("?", r"\?")):
            check_model_config(model)


def test_fields_that_pass_are_taken_by_the_class() -> None:
    rope = {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    model = ModelConfig(type="llama", config={"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope})
    check_model_config(model)
    config = model_config(model)
    assert isinstance(config, PretrainedConfig)
    assert (config.hidden_size, config.head_dim, config.use_cache) == (64, 16, True)
    assert config.rope_parameters["factor"] == 8.0


def test_what_only_transformers_can_refuse_is_one_line_too() -> None:
    with pytest.raises(ConfigErrors.__mro__[1], match="refuses") as caught:
        build_meta(ModelConfig(type="llama", config={"pad_token_id": 99_999_999, "num_hidden_layers": 1}))
    assert "\n" not in str(caught.value)


def test_resolved_fields_have_standard_names() -> None:
    fields = resolved_fields(ModelConfig(type="gpt2", config={"n_embd": 64}))
    assert (fields["hidden_size"], fields["num_hidden_layers"], fields["n_layer"]) == (64, 12, 12)


def test_checking_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from mgpu_pipe.models.fields import check_model_config; from mgpu_pipe.config.schema import *;"
        "import mgpu_pipe.checks.check_model, mgpu_pipe.models.weights.folder;"
        "m = ModelConfig(type='mixtral', config={'hidden_size': 64}); check_model_config(m);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_field_that_a_forward_pass_needs_is_asked_for() -> None:
    with pytest.raises(ConfigErrors, match=r"model\.config\.default_language=null: give the language"):
        check_model_config(ModelConfig(type="xmod"))
    check_model_config(ModelConfig(type="xmod", config={"default_language": "en_XX"}))


@pytest.mark.parametrize(
    ("architecture", "model_class"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
        ("Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("FSDPBertForMaskedLM", "AutoModelForMaskedLM"),
        ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
        ("NoSuchModel", "AutoModelForCausalLM"),
    ],
)
def test_an_architecture_is_built_by_the_class_that_knows_it(architecture: str, model_class: str) -> None:
    assert class_of([architecture]) == model_class


def test_a_type_is_refused_where_the_objective_has_no_model_of_it() -> None:
    with pytest.raises(ConfigError, match="transformers has no sequence classifier rwkv"):
        check_model_config(ModelConfig(type="rwkv"), "AutoModelForSequenceClassification")
    assert "t5" in model_types("AutoModelForSeq2SeqLM") and "t5" not in model_types()
