"""Closed forms of the vision parts of vision-language models against the real modules."""

from __future__ import annotations

from typing import Any

import pytest

from mgpu_pipe.architectures.formulas.parameters import count_parameters, has_exact_sizes
from mgpu_pipe.architectures.formulas.towers import vision_parameters
from mgpu_pipe.config.convert import merged
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.model_parts import freeze_parameters, part_patterns, unused_parameters
from mgpu_pipe.planning.other_models import tower_parameters, trained_apart

CLASS = "AutoModelForImageTextToText"
SEEING = (
    "gemma3",
    "gemma4",
    "internvl",
    "llava",
    "mistral3",
    "paligemma",
    "qwen25_vl",
    "qwen35",
    "qwen3_vl",
    "smolvlm",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "internvl": {
        "vision_config": {
            "attention_bias": True,
            "use_qk_norm": True,
            "use_mean_pooling": False,
            "use_mask_token": True,
            "use_absolute_position_embeddings": False,
        }
    },
    "llava": {"multimodal_projector_bias": False, "vision_feature_layer": [-2, -1]},
    "paligemma": {"vision_config": {"vision_use_head": True}},
    "qwen3_vl": {"vision_config": {"deepstack_visual_indexes": []}},
}


def tiny(name: str, **fields: Any) -> ModelConfig:
    model = compose([f"model={name}_tiny", "objective=vision_language", "data=picture_chats"])[0].model
    return ModelConfig(name=name, type=model.type, config=merged(model.config, fields))


@pytest.mark.parametrize(
    ("name", "fields"), [*((name, {}) for name in SEEING), *VARIANTS.items()], ids=lambda given: str(given)[:12]
)
def test_vision_parts_are_counted_exactly(name: str, fields: dict[str, Any]) -> None:
    model = tiny(name, **fields)
    built, parts = build_meta(model, CLASS), vision_parameters(resolved_fields(model))
    assert parts is not None
    sizes = {path: parameter.numel() for path, parameter in built.named_parameters()}
    language = sum(size for path, size in sizes.items() if "language_model" in path or "text_model" in path)
    assert parts.total == sum(sizes.values()) - language - sizes.get("lm_head.weight", 0)


def test_a_model_with_unknown_parts_is_not_counted() -> None:
    fields = resolved_fields(tiny("llava"))
    assert has_exact_sizes(fields)
    for changed in ({"vision_config": {"model_type": "dinov2"}}, {"audio_config": {"model_type": "whisper"}}):
        assert not has_exact_sizes({**fields, **changed}) and count_parameters({**fields, **changed}) is None


@pytest.mark.parametrize("freeze", [["vision"], ["language"], ["vision", "language"], ["projector"], []])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_parts_that_train_are_those_that_are_not_frozen(name: str, freeze: list[str]) -> None:
    model = tiny(name)
    built, towers = build_meta(model, CLASS), tower_parameters(resolved_fields(model))
    freeze_parameters(built, freeze)
    trained = {path: parameter.numel() for path, parameter in built.named_parameters() if parameter.requires_grad}
    unused = sum(p.numel() for path, p in built.named_parameters() if path in unused_parameters(built))
    language = [pattern.removesuffix("*") for pattern in part_patterns(built)["language"]]
    of_language = sum(size for path, size in trained.items() if path.startswith(tuple(language)))
    expected = sum(trained.values()) - of_language + unused * ("vision" not in freeze)
    follows = bool(of_language) * sum(towers.values())
    assert trained_apart(towers, freeze, PeftConfig()) == expected - follows


def test_adapters_train_a_part_that_is_named() -> None:
    towers = {"vision": 5.0, "projector": 3.0}
    assert trained_apart(towers, [], PeftConfig(name="lora")) == 0
    assert trained_apart(towers, [], PeftConfig(name="lora", train_also=["projector"])) == 3
    assert trained_apart(towers, ["*"], PeftConfig()) == 0
