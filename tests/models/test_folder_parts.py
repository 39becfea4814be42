"""Folders whose models have parts: one form of their configuration for checks, building, resuming and shrinking."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checkpoint.strict_json import canonical, parse
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError, CheckpointError
from mgpu_pipe.models.build import build_meta, model_config
from mgpu_pipe.models.fields import check_model_config, resolved_fields
from mgpu_pipe.models.model_settings import model_settings, require_model_settings, with_recorded_data
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.shrink_model import shrink_model
from tests.models.tiny import tiny_model

MODELS = {
    "clip_tiny": "contrastive",
    "vit_bert_tiny": "contrastive",
    "llava_tiny": "vision_language",
    "qwen25_vl_tiny": "vision_language",
    "whisper_tiny": "speech_seq2seq",
}


def folder_of(name: str, folder: Path, **changes: Any) -> ModelConfig:
    config = model_config(compose([f"model={name}", f"objective={MODELS[name]}"])[0].model)
    for field, value in changes.items():
        setattr(config.text_config, field, value)
    config.save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("name", ["clip_tiny", "vit_bert_tiny", "llava_tiny", "qwen25_vl_tiny"])
def test_a_field_of_a_part_is_checked_and_leaves_the_others(name: str, tmp_path: Path) -> None:
    model = folder_of(name, tmp_path)
    before = model_config(model).to_dict()
    model.config = {"text_config": {"max_position_embeddings": 77}}
    check_model_config(model)
    after = model_config(model).to_dict()
    assert after["text_config"].pop("max_position_embeddings") == 77
    before["text_config"].pop("max_position_embeddings")
    assert after == before
    assert resolved_fields(model)["max_position_embeddings"] == 77
    model.config = {"text_config": {"max_position_embedings": 77}}
    with pytest.raises(BadInputError, match=r"did you mean model\.config\.text_config\.max_position_embeddings\?"):
        check_model_config(model)


def test_what_the_data_decided_is_no_other_model(tmp_path: Path) -> None:
    model = folder_of("vit_bert_tiny", tmp_path, eos_token_id=None)
    trained = ModelConfig(path=model.path, config={"text_config": {"eos_token_id": 7}})
    saved = model_settings(model_config(trained))
    live = model_settings(model_config(with_recorded_data(model, saved)))
    require_model_settings(saved, live, tmp_path)
    other = ModelConfig(path=model.path, config={"text_config": {"layer_norm_eps": 0.5}})
    with pytest.raises(CheckpointError) as refused:
        require_model_settings(saved, model_settings(model_config(with_recorded_data(other, saved))), tmp_path)
    assert "model: text_config.layer_norm_eps=0.5 (saved with 1e-12); use" in str(refused.value)


def test_a_picture_token_that_a_tower_keeps_is_no_other_model(tmp_path: Path) -> None:
    model = compose(["model=phi4_multimodal_tiny"])[0].model
    saved = model_settings(model_config(replace(model, config=copy.deepcopy(model.config))))
    saved["vision_config"]["image_token_id"] = 3
    live = model_settings(model_config(with_recorded_data(model, saved)))
    require_model_settings(saved, live, tmp_path)
    assert live["vision_config"]["hidden_size"] == saved["vision_config"]["hidden_size"] == 64


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_folder_is_made_small_as_its_type_is(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    by_type = compose([f"model={name}", f"objective={MODELS[name]}"])[0].model
    kind = description(MODELS[name]).model_class
    small = [shrink_model(model, ParallelDims(tp=2), 24, model_class=kind) for model in (folder, by_type)]
    built = [build_meta(model, kind) for model in small]
    layouts = [{name: p.ndim for name, p in model.named_parameters()} for model in built]
    assert layouts[0] == layouts[1]
    assert sum(p.numel() for p in built[0].parameters()) < 200_000
    assert type(built[0]) is type(built[1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mamba2"])
def test_settings_survive_the_checkpoints_json(family: str) -> None:
    sizes = {"num_heads": 8} if family == "mamba2" else {}  # whose time_step_limit is infinite
    settings = model_settings(model_config(tiny_model(family, **sizes)))
    saved = parse(canonical(settings), "")
    require_model_settings(saved, settings, Path("step"))
    assert settings["vocab_size"] == 128


def test_classes_saved_as_numbers_may_get_names() -> None:
    number, named, other = (
        model_settings(model_config(tiny_model("llama", id2label=dict(enumerate(names)))))
        for names in (["0", "1"], ["no", "yes"], ["yes", "no"])
    )
    require_model_settings(number, named, Path("step"))
    with pytest.raises(CheckpointError, match=r"another model: id2label="):
        require_model_settings(named, other, Path("step"))


def test_another_epsilon_is_refused_though_every_shape_fits() -> None:
    one, other = (model_settings(model_config(tiny_model("llama", rms_norm_eps=eps))) for eps in (1e-5, 1e-6))
    with pytest.raises(CheckpointError, match=r"another model: rms_norm_eps=1e-06 \(saved with 1e-05\); use the model"):
        require_model_settings(one, other, Path("step"))
    require_model_settings(None, other, Path("step"))  # saved before settings were recorded
    newer = {**other, "a_field_of_a_newer_transformers": 1}
    require_model_settings(other, newer, Path("step"))
