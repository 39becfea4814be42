"""A rotary field that a user sets reaches the model, or is refused with the one that does. Oracle: transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import model_config

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


@pytest.mark.parametrize("base", ["preset", *FOLDERS])
def test_a_rotary_field_reaches_the_model_or_is_refused_with_the_one_that_does(base: str, tmp_path: Path) -> None:
    words = words_of(base, tmp_path)
    theta = 10000.0 if base == "preset" else 20000.0
    taken = 0
    for word, wanted in ASKED.items():
        asked = word
        try:
            config = model_config(compose([*words, asked])[0].model)
        except ConfigErrors as error:
            (line,) = str(error).splitlines()
            asked = line.rpartition("; use ")[2]
            if asked == line:
                assert "as the folder's config.json has them" in line and base == "old, scaled"
                continue
            config = model_config(compose([*words, *asked.split()])[0].model)
        taken += 1
        found = config.rope_parameters
        assert {name: found.get(name) for name in wanted} == wanted, (word, asked, found)
        assert found["rope_theta"] == wanted.get("rope_theta", theta), (word, asked, found)
    assert taken >= 3


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
        model_config(compose(words)[0].model)


def test_every_type_of_layers_is_named() -> None:
    words = ["model.type=gemma3_text", "model.config.rope_theta=5.0"]
    layers = "{full_attention:{rope_type:default,rope_theta:1e6},sliding_attention:{rope_type:default,rope_theta:1e4}}"
    with pytest.raises(ConfigErrors, match=r"full_attention\.rope_theta=5\.0 .*sliding_attention\.rope_theta=5\.0"):
        model_config(compose(["model=hf", *words, f"model.config.rope_parameters={layers}"])[0].model)
