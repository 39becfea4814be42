"""What a checkpoint records of the model's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.checkpoint.chunks import canonical, parse
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.build import model_config
from mgpu_pipe.models.model_settings import model_settings, require_model_settings
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mamba2"])
def test_settings_survive_the_checkpoints_json(family: str) -> None:
    sizes = {"num_heads": 8} if family == "mamba2" else {}  # whose time_step_limit is infinite
    settings = model_settings(model_config(tiny_model(family, **sizes)))
    saved = parse(canonical(settings), "")
    require_model_settings(saved, settings, Path("step"))
    assert settings["vocab_size"] == 128


def test_another_epsilon_is_refused_though_every_shape_fits() -> None:
    one, other = (model_settings(model_config(tiny_model("llama", rms_norm_eps=eps))) for eps in (1e-5, 1e-6))
    with pytest.raises(CheckpointError, match=r"another model: rms_norm_eps=1e-06 \(saved with 1e-05\); use the model"):
        require_model_settings(one, other, Path("step"))
    require_model_settings(None, other, Path("step"))  # saved before settings were recorded
    newer = {**other, "a_field_of_a_newer_transformers": 1}
    require_model_settings(other, newer, Path("step"))
