"""Closed forms of the vision parts of vision-language models against the real modules."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mgpu_pipe.architectures.formulas.parameters import count_parameters, has_exact_sizes
from mgpu_pipe.architectures.formulas.towers import vision_parameters
from mgpu_pipe.config.convert import merge
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.model_parts import freeze_parameters, part_patterns, unused_parameters
from mgpu_pipe.parallel.tensor.cut import tensor_plan
from mgpu_pipe.planning.activation_bytes import Activations, kept_bytes
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.planning.model_work import model_work
from mgpu_pipe.planning.other_models import tower_parameters, trained_apart, uncut_parameters

CLASS = "AutoModelForImageTextToText"
SEEING = (
    *("gemma3", "gemma4", "internvl", "llava", "mistral3", "paligemma", "qwen25_vl", "qwen35", "qwen3_vl", "smolvlm"),
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
    return ModelConfig(name=name, type=model.type, config=merge(model.config, fields))


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


@pytest.mark.parametrize("name", SEEING)
def test_what_tensor_parallelism_leaves_whole_is_counted_exactly(name: str) -> None:
    model = tiny(name)
    built, fields = build_meta(model, CLASS), resolved_fields(model)
    plan = tensor_plan(built)
    uncut = sum(
        parameter.numel()
        for path, parameter in built.named_parameters()
        if path.rpartition(".")[0] not in plan and not re.search(r"language_model|text_model|lm_head|[qk]_norm", path)
    )
    assert sum(uncut_parameters(fields, ()).values()) == uncut
    whole, towers = uncut_parameters(fields, ("vision", "projector")), tower_parameters(fields)
    assert whole == towers and uncut < sum(towers.values())


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


SIDE = 8
"""Patches across a picture."""
PER_PICTURE = SIDE**2


def tower_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A real tower, and arguments of pictures of :data:`PER_PICTURE` patches: two, or one in native size."""
    fields = {"vision_config": {"image_size": 2 * SIDE}} if name in ("llava", "paligemma", "internvl") else {}
    model = materialise(build_meta(tiny(name, **fields), CLASS), 1, "cpu")
    config: Any = model.config.vision_config
    config._attn_implementation = "eager"
    tower: Any = getattr(model.model, "vision_tower", None) or model.model.visual
    if name in ("llava", "paligemma", "internvl"):
        return tower, {"pixel_values": torch.randn(2, config.num_channels, 2 * SIDE, 2 * SIDE)}
    if name == "mistral3":
        sizes = torch.tensor([[2 * SIDE, 2 * SIDE]])
        return tower, {"pixel_values": torch.randn(1, config.num_channels, 2 * SIDE, 2 * SIDE), "image_sizes": sizes}
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return tower, {"hidden_states": torch.randn(PER_PICTURE, values), "grid_thw": torch.tensor([[1, SIDE, SIDE]])}


def work_of(name: str) -> Any:
    """Work of the same tower alone, by the formulas."""
    words = [f"model={name}_tiny", "objective=vision_language", "data=picture_chats"]
    config = compose(words)[0]
    work = model_work(config, resolved_fields(config.model))
    assert work.tower_layers
    pictures = 2 if name in ("llava", "paligemma", "internvl") else 1
    return replace(work, patches=pictures * PER_PICTURE, patches_in_view=PER_PICTURE).tower_work()


TOWERS = ("llava", "paligemma", "internvl", "mistral3", "qwen3_vl", "qwen25_vl")


@pytest.mark.parametrize("name", TOWERS)
def test_flops_of_a_tower_are_those_that_torch_counts(name: str) -> None:
    """Of a block that attends to whole pictures; LLaVA has a token more than patches."""
    tower, pictures = tower_of(name)
    blocks = next(each for each in tower.modules() if isinstance(each, torch.nn.ModuleList))
    block = blocks[getattr(tower.config, "fullatt_block_indexes", [0])[0]]
    counter = FlopCounterMode(display=False)
    block.register_forward_pre_hook(lambda *_: counter.__enter__() and None)
    block.register_forward_hook(lambda *_: counter.__exit__(None, None, None))
    with torch.no_grad():
        tower(**pictures)
    work = replace(work_of(name), rows=1.0, micro_batches=1.0)
    assert work.model_flops / 3 == pytest.approx(counter.get_total_flops() * len(blocks), rel=0.02)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_keeps_about_the_bytes_that_its_blocks_save(name: str) -> None:
    tower, pictures = tower_of(name)
    tower.config._attn_implementation = "sdpa"
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(**pictures)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    work = replace(work_of(name), rows=1.0)
    formula = work.layers * kept_bytes(work, Activations(item=4.0, compiled=0.0, copies=1.0))
    assert formula == pytest.approx(saved, rel=0.2)


def test_a_frozen_tower_costs_less_memory_and_work() -> None:
    words = ("model=qwen25_vl_7b", "objective=vision_language", "data=picture_chats", "trainer.accelerator=cpu")
    alone, frozen = (compose([*words, f"model.freeze={freeze}"])[0] for freeze in ("[]", "[vision]"))
    plans, works = [], []
    for config in (alone, frozen):
        plan = memory_by_rank(config)
        assert plan is not None and not plan.assumes
        plans.append(plan)
        works.append(model_work(config, resolved_fields(config.model)))
    assert plans[0].terms["activations of the tower"] > 0 and "activations of the tower" not in plans[1].terms
    vision = vision_parameters(resolved_fields(alone.model))
    assert vision is not None
    saved = plans[0].terms["optimizer"] - plans[1].terms["optimizer"]
    assert saved == pytest.approx(8 * (vision.total - vision.projector), rel=1e-6)
    without = replace(works[0], tower_layers=0.0).model_flops
    assert works[0].model_flops - without == pytest.approx(3 * (works[1].model_flops - without))
