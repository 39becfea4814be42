"""Shipped models, and changes of their fields. Oracle: the composed configurations."""

from __future__ import annotations

import pytest

from mgpu_pipe.checks.preflight import preflight, preflight_errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.presets import differs_from_preset
from mgpu_pipe.system.conf_folders import conf_dir


def test_no_shipped_model_differs_from_itself() -> None:
    names = sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml") if file.stem != "hf")
    assert len(names) > 30
    assert not [name for name in names if differs_from_preset(compose([f"model={name}"])[0].model)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["model=llama_tiny", "model.config.pad_token_id=5000"], "Padding_idx must be within num_embeddings"),
        (["model=llama_tiny", "model.config.head_dim=7"], "RoPE requires an even rotary dimension"),
        (["model=llama_tiny", "model.config.rms_norm_eps=-1"], "expected float, got int"),
        (["model=gpt2_tiny", "model.config.resid_pdrop=1.5"], "resid_pdrop=1.5: use a probability, from 0 to 1"),
        (["model=llama_tiny", "model.config.attention_dropout=2"], "attention_dropout=2: use a probability"),
        (["model=mixtral_tiny", "model.config.num_experts_per_tok=99"], "a layer has 8 experts; use at most 8"),
    ],
)
def test_what_the_launch_or_the_first_step_would_refuse_is_refused_by_check(words: list[str], reason: str) -> None:
    config = compose(["trainer.accelerator=cpu", *words])[0]
    assert differs_from_preset(config.model)
    (error,) = preflight_errors(config, elsewhere=True)
    assert reason in str(error)
    assert "\n" not in str(error)
    preflight(compose(["trainer.accelerator=cpu", words[0], "model.config.vocab_size=2048"])[0], elsewhere=True)
