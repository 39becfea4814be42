"""``model.type`` and ``model.config.*`` are checked. Oracle: transformers' own classes and code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from mgpu_pipe.architectures.config_source import NO_DEFAULT, config_class
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models import field_ranges
from mgpu_pipe.models.build import build_meta, model_config
from mgpu_pipe.models.field_ranges import KNOWN, check_activations, check_ranges, unknown_activations
from mgpu_pipe.models.field_sizes import EXPERTS, EXPERTS_MAY_BE_ZERO, largest_width
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
    monkeypatch.setattr(field_ranges, "modeling_source", lambda model_type: (source, ""))
    check_activations(ModelConfig(type="llama", config={"hidden_act": "own"}))
    monkeypatch.setattr(field_ranges, "modeling_source", lambda model_type: (source.partition("else")[2], ""))
    with pytest.raises(ConfigError, match="no such activation function"):
        check_activations(ModelConfig(type="llama", config={"hidden_act": "own"}))
