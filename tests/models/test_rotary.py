"""Rotary fields reach the model or are refused; tables that depend on the length. Oracle: transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from mgpu_pipe.checks.check_model import check_model
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models import build, reached_fields
from mgpu_pipe.models.build import build_meta, materialise, model_config
from mgpu_pipe.models.fields import MODEL_CLASSES, ModelClassError, config_fields, model_types
from mgpu_pipe.models.reached_fields import check_reached
from mgpu_pipe.models.rotary import fix_rotary_length, length_at_hand
from mgpu_pipe.system.conf_folders import conf_dir
from tests.models.tiny import tiny_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64}
LLAMA |= {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
FOLDERS: dict[str, dict[str, Any]] = {
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "old": {"rope_theta": 20000.0, "rope_scaling": None},
    "old, scaled": {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
}
"""What transformers 5 writes, and what its earlier versions wrote."""
ASKED: dict[str, dict[str, Any]] = {
    "model.config.rope_theta=1000.0": {"rope_theta": 1000.0},
    "model.config.rope_parameters.rope_theta=1000.0": {"rope_theta": 1000.0},
    "model.config.rope_scaling={rope_type:linear,factor:2.0}": {"rope_type": "linear", "factor": 2.0},
    "model.config.rope_parameters={rope_type:linear,factor:2.0}": {"rope_type": "linear", "factor": 2.0},
    "model.config.partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
}


def words_of(base: str, folder: Path) -> list[str]:
    if base == "preset":
        return ["model=llama_tiny"]
    (folder / "config.json").write_text(json.dumps({**LLAMA, **FOLDERS[base]}), encoding="utf-8")
    return ["model=hf", f"model.path={folder}"]


def rotary_of(words: list[str]) -> dict[str, Any]:
    """Rotary parameters that the model of these words has, if they are accepted."""
    model = compose(words)[0].model
    check_reached(model)
    return dict(model_config(model).rope_parameters)


@pytest.mark.parametrize("base", ["preset", *FOLDERS])
def test_a_rotary_field_reaches_the_model_or_is_refused_with_the_one_that_does(base: str, tmp_path: Path) -> None:
    words = words_of(base, tmp_path)
    theta = 10000.0 if base == "preset" else 20000.0
    for word, wanted in ASKED.items():
        asked = word
        try:
            found = rotary_of([*words, asked])
        except ConfigErrors as error:
            (line,) = str(error).splitlines()
            asked = line.rpartition("; use ")[2]
            found = rotary_of([*words, *asked.split()])
        assert {name: found.get(name) for name in wanted} == wanted, (word, asked, found)
        assert found["rope_theta"] == wanted.get("rope_theta", theta), (word, asked, found)


@pytest.mark.parametrize(
    "word", ["rope_theta=abc", "rope_theta=-5", "rope_parameters.rope_theta=0", "rope_scaling.factor=x"]
)
def test_numbers_that_no_rotation_has_are_refused(word: str) -> None:
    key, _, value = f"model.config.{word}".partition("=")
    with pytest.raises(ConfigErrors) as caught:
        model_config(compose(["model=llama_tiny", f"{key}={value}"])[0].model)
    assert str(caught.value) == f"{key}={value}: give a number above 0"


def test_a_part_of_a_model_is_held_to_the_same() -> None:
    words = ["model=qwen25_vl_tiny", "model.config.text_config.rope_theta=5.0"]
    with pytest.raises(ConfigErrors, match=r"use model\.config\.text_config\.rope_parameters\.rope_theta=5\.0"):
        rotary_of(words)


GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 100, "hidden_size": 64}
GEMMA |= {"num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 64}
BERT = {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "vocab_size": 100, "hidden_size": 64}
BERT |= {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": 0}
NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 100, "hidden_size": 64}
NEOX |= {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
LINEAR = "{rope_type:linear,factor:8.0}"
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LAYERS = "model.config.rope_parameters.full_attention"


def folder_of(config: dict[str, Any], folder: Path) -> list[str]:
    """Words for a model folder as transformers 5 writes it, with the class's own rotary parameters."""
    AutoConfig.for_model(**config).save_pretrained(folder)
    return ["model=hf", f"model.path={folder}"]


@pytest.mark.parametrize(
    ("word", "full"),
    [
        (f"model.config.rope_scaling={LINEAR}", SCALED),
        ("model.config.rope_theta=1e6", {"rope_type": "default", "rope_theta": 1e6}),
        ("model.config.rope_local_base_freq=1e4", {"rope_type": "default", "rope_theta": 1e6}),
        (f"{LAYERS}={LINEAR}", SCALED),
    ],
)
def test_what_reaches_layers_of_several_types_is_accepted(word: str, full: dict[str, Any], tmp_path: Path) -> None:
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    found = rotary_of([*folder_of(GEMMA, tmp_path), word])
    assert found == {"full_attention": full, "sliding_attention": sliding}


def test_a_base_beside_layers_that_have_none_is_accepted() -> None:
    layers = "{full_attention:{rope_type:linear,factor:8},sliding_attention:{rope_type:default,rope_theta:1e4}}"
    words = ["model=hf", "model.type=gemma3_text", f"model.config.rope_parameters={layers}"]
    found = rotary_of([*words, "model.config.rope_theta=5e5"])
    assert found["full_attention"]["rope_theta"] == 5e5 and found["sliding_attention"]["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("config", "word", "fix", "found"),
    [
        (GEMMA, "rope_theta=5e5", f"{LAYERS}.rope_theta=500000.0", (5e5, 1e4)),
        (GEMMA, f"rope_parameters={LINEAR}", f"{LAYERS}={LINEAR}", (1e6, 1e4)),
        (GEMMA, "rope_local_base_freq=7.0", "", (1e6, 7.0)),
        (BERT, "rope_theta=7.0", f"{LAYERS}.rope_theta=7.0", (7.0, 1e4)),
        (BERT, "global_rope_theta=7.0", f"{LAYERS}.rope_theta=7.0", (7.0, 1e4)),
        (BERT, "local_rope_theta=7.0", "", (160000.0, 7.0)),
        (NEOX, "rope_theta=7.0", "model.config.rope_parameters.rope_theta=7.0", (7.0, 0.25)),
        (NEOX, "rotary_emb_base=7.0", "model.config.rope_parameters.rope_theta=7.0", (7.0, 0.25)),
        (NEOX, "rotary_pct=0.5", "model.config.rope_parameters.partial_rotary_factor=0.5", (10000.0, 0.5)),
    ],
)
def test_dropped_fields_are_refused_with_those_that_reach(
    config: dict[str, Any], word: str, fix: str, found: tuple[float, float], tmp_path: Path
) -> None:
    words = folder_of(config, tmp_path)
    fix = fix or "model.config.rope_parameters.sliding_attention.rope_theta=7.0"
    with pytest.raises(ConfigErrors) as caught:
        rotary_of([*words, f"model.config.{word}"])
    assert str(caught.value).rpartition("; use ")[2] == fix
    advised = rotary_of([*words, *fix.split()])
    if config is NEOX:
        assert (advised["rope_theta"], advised["partial_rotary_factor"]) == found
    else:
        assert tuple(advised[name]["rope_theta"] for name in ("full_attention", "sliding_attention")) == found
    if "linear" in fix:
        assert advised["full_attention"] == SCALED


TEXTS = {file.stem: file.read_text() for file in (conf_dir() / "model").glob("*.yaml")}
PRESETS = sorted(name for name, text in TEXTS.items() if "\n  rope_parameters:" in text and "_attention: {" not in text)
"""Models with rotary parameters that are the same in all layers; the class is asked about the others."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_own_parameters_answer_as_its_class_does(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"model={preset}", "model.config.rope_theta=777.0"]
    with monkeypatch.context() as patch:
        patch.setattr(build, "model_config", None)  # no class is asked
        with pytest.raises(ConfigErrors) as fast:
            check_reached(compose(words)[0].model)
    monkeypatch.setattr(reached_fields, "_dropped_beside_parameters", lambda model: iter(()))
    with pytest.raises(ConfigErrors) as slow:
        check_reached(compose(words)[0].model)
    assert str(fast.value) == str(slow.value)


@pytest.mark.parametrize("word", ["rope_theta=777.0", "partial_rotary_factor=0.5"])
def test_names_of_other_families_are_refused_without_rope_parameters(word: str) -> None:
    words = ["model=hf", "model.type=gpt_neox"]
    with pytest.raises(ConfigErrors, match=rf"use model\.config\.rope_parameters\.{word}"):
        rotary_of([*words, f"model.config.{word}"])
    name, _, value = word.partition("=")
    assert rotary_of([*words, f"model.config.rope_parameters.{word}"])[name] == float(value)


def test_a_folder_with_both_forms_is_accepted_as_it_is(tmp_path: Path) -> None:
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 7.0}
    both["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **both}), encoding="utf-8")
    words = ["model=hf", f"model.path={tmp_path}"]
    assert rotary_of(words) == {"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    assert rotary_of([*words, "model.config.rope_theta=9.0"])["rope_theta"] == 9.0
    assert rotary_of([*words, "model.config.rope_scaling.factor=4.0"])["factor"] == 4.0
    with pytest.raises(
        ConfigErrors, match=r"use model\.config\.rope_scaling\.rope_theta=9\.0|rope_scaling=\{rope_theta:9"
    ):
        rotary_of([*words, "model.config.rope_parameters.rope_theta=9.0"])


def test_a_window_that_another_field_turns_off_is_refused(tmp_path: Path) -> None:
    qwen = {
        **LLAMA,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "sliding_window": 64,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(qwen), encoding="utf-8")
    words, window = ["model=hf", f"model.path={tmp_path}"], "model.config.sliding_window=128"
    check_reached(compose(words)[0].model)
    with pytest.raises(
        ConfigErrors, match=r"use_sliding_window is false; set model\.config\.use_sliding_window=true too"
    ):
        check_reached(compose([*words, window])[0].model)
    model = compose([*words, window, "model.config.use_sliding_window=true"])[0].model
    check_reached(model)
    assert model_config(model).sliding_window == 128


def test_the_check_leaves_the_configuration_as_it_is() -> None:
    layers = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    model = ModelConfig(name="hf", type="gemma3_text", config={"rope_parameters": copy.deepcopy(layers)})
    check_reached(model)
    assert model.config == {"rope_parameters": layers}


def test_check_refuses_what_would_be_dropped() -> None:
    with pytest.raises(ConfigErrors, match=r"use model\.config\.rope_parameters\.rope_theta=5\.0"):
        config = compose(["model=llama_tiny", "model.config.rope_theta=5.0"])[0]
        check_model(config.model, config.data, config.objective)


@pytest.mark.exhaustive
def test_bases_of_all_families_are_refused_exactly_where_they_are_dropped() -> None:
    accepted, refused = 0, 0
    for family in sorted({family for model_class in MODEL_CLASSES for family in model_types(model_class)}):
        try:
            own = getattr(AutoConfig.for_model(family), "rope_parameters", None)
        except (ValueError, StrictDataclassError):
            continue
        if not own or not {"rope_parameters", "rope_theta"} <= (config_fields(family) or set()):
            continue
        try:
            check_reached(ModelConfig(name="hf", type=family, config={"rope_parameters": own}))
        except ModelClassError:  # a part of a model alone
            continue
        except ConfigErrors as error:
            assert "transformers would drop" not in str(error), family
            continue
        model = ModelConfig(type=family, config={"rope_theta": 777.0})
        try:
            is_there = "777.0" in str(model_config(model).rope_parameters)
        except ConfigError:  # the class takes no number
            continue
        try:
            check_reached(model)
            is_accepted = True
        except ConfigErrors:
            is_accepted = False
        assert is_accepted == is_there, family
        accepted, refused = accepted + is_accepted, refused + (not is_accepted)
    assert accepted > 100 and refused > 10


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
