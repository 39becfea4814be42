"""Rules by which transformers reads a folder beyond its fields. Oracle: transformers' own ``from_pretrained``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config

from mgpu_pipe.checkpoint.strict_json import canonical, parse
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise, model_config
from mgpu_pipe.models.model_settings import model_settings, recorded_model, require_model_settings
from mgpu_pipe.models.weights.folder import read_config_json, with_infinities
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.models.weights.slices import fill_from_folder
from tests.models.tiny import tiny_model, write_folder

MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "hidden_size": 64}


def folder_of(kind: str, folder: Path, sizes: dict[str, Any], **fields: object) -> Path:
    """A folder of ``kind``, whose config.json gets ``fields``."""
    write_folder(materialise(build_meta(tiny_model(kind, **sizes)), 1, "cpu"), folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    ("kind", "sizes", "fields"),
    [
        ("mistral", {"sliding_window": 4}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ("mamba2", MAMBA, {}),
    ],
)
def test_a_folder_gives_the_logits_of_transformers(
    tmp_path: Path, kind: str, sizes: dict[str, Any], fields: dict[str, object]
) -> None:
    model = ModelConfig(path=str(folder_of(kind, tmp_path, sizes, **fields)))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(input_ids=ids).logits
        whole = load_pretrained(model, "cpu").eval()(input_ids=ids).logits
        sliced = fill_from_folder(build_meta(model), model, "cpu").eval()(input_ids=ids).logits
    torch.testing.assert_close(whole, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(sliced, theirs, rtol=0, atol=1e-6)


def test_a_mistral_with_types_of_layers_is_a_ministral(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": 4}))
    assert read_config_json(tmp_path)["model_type"] == "mistral"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "layer_types": ["full_attention"]}))
    assert read_config_json(tmp_path)["model_type"] == "ministral"


def test_infinities_are_read_at_any_depth() -> None:
    written = {"limit": [0.0, {"__float__": "Infinity"}], "part": {"low": {"__float__": "-Infinity"}}, "text": "NaN"}
    assert with_infinities(written) == {"limit": [0.0, math.inf], "part": {"low": -math.inf}, "text": "NaN"}
    for other in ({"__float__": "1"}, {"__float__": 1}, {"__float__": ["NaN"]}, {"__float__": "NaN", "more": 1}):
        assert with_infinities(other) == other


@pytest.mark.parametrize("written", [{"__float__": "Infinity"}, "Infinity"])
def test_a_checkpoint_that_records_an_infinity_gives_the_model_back(written: object) -> None:
    config = Mamba2Config(**MAMBA, vocab_size=64, num_hidden_layers=2)
    live = model_settings(config)
    saved = parse(canonical({**live, "time_step_limit": [0.0, written]}), "run")
    recorded = model_config(recorded_model(saved, Path("run")))
    assert list(recorded.time_step_limit) == [0.0, math.inf]
    assert model_settings(recorded) == live
    require_model_settings(parse(canonical(live), "run"), live, Path("run"))
