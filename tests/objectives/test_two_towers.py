"""Two towers of any kinds (ViT and BERT, say). Oracle: transformers' own model and loss over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.contrastive import ContrastiveObjective
from tests.inference.support import write_tokenizer
from tests.models.tiny import write_folder
from tests.objectives.test_contrastive import captioned, compared_with_transformers, goes_on_and_is_exported
from tests.support import small_runs

GIVEN = ("objective=contrastive", "model=vit_bert_tiny", "logger=none", "trainer.progress=off")
CLASS = "AutoModelForZeroShotImageClassification"
ROBERTA = ("model.config.text_config.model_type=xlm-roberta", "model.config.text_config.max_position_embeddings=40")
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
INNER = {**WIDTH, "intermediate_size": 48}
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
PICTURE = {"image_size": 8, "patch_size": 2, "num_channels": 1}
SEE: dict[str, dict[str, Any]] = {
    "vit": {**INNER, **NO_DROPOUT},
    "clip_vision_model": INNER,
    "siglip_vision_model": INNER,
    "dinov2": {**WIDTH, **NO_DROPOUT, "mlp_ratio": 2},
}


def made(sees: str, reads: str) -> ContrastiveObjective:
    text = {"model_type": reads, "vocab_size": 96, "max_position_embeddings": 20, "eos_token_id": 5}
    parts = {
        "text_config": {**INNER, **NO_DROPOUT, **text},
        "vision_config": {"model_type": sees, **PICTURE, **SEE[sees]},
    }
    model = build_meta(ModelConfig(type="vision-text-dual-encoder", config=parts), CLASS)
    return ContrastiveObjective(materialise(model, 1, "cpu").double(), None, lambda step: 1.0)


@pytest.mark.parametrize(("sees", "reads"), [*((sees, "bert") for sees in SEE), ("vit", "roberta")])
def test_loss_and_gradients_are_transformers_own(sees: str, reads: str) -> None:
    objective = made(sees, reads)
    batch = objective.random_batch(3, 1, 6, 12, packed=False)
    batch["input_ids"][batch["input_ids"] == 1] = 7  # RoBERTa counts no position for what fills up
    compared_with_transformers(objective, batch)


def pictured(folder: Path, *overrides: str) -> RunConfig:
    chosen = () if "model=hf" in overrides else ("model=vit_bert_tiny",)
    return captioned(folder, *chosen, *overrides)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_is_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = goes_on_and_is_exported(pictured, "AutoModel", tmp_path, capsys)
    assert type(exported).__name__ == "VisionTextDualEncoderModel"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config": "swin"}, "model.config.vision_config.model_type=swin: no other tower was tried"),
        ({"text_config": "t5"}, "model.config.text_config.model_type=t5: no other tower was tried; use one of bert"),
    ],
)
def test_towers_that_were_not_tried_are_refused(changes: dict[str, str], said: str) -> None:
    config = compose([*GIVEN])[0]
    fields = {"model_type": config.model.type, **config.model.config}
    for part, kind in changes.items():
        fields[part] = {**fields[part], "model_type": kind}
    (error,) = config.objective.model_errors(fields)
    assert str(error).startswith(said)


@pytest.mark.slow
def test_a_folder_whose_text_tower_names_no_end_is_resumed_and_opened(tmp_path: Path) -> None:
    """BERT's configuration names no end of a text: the run takes its tokenizer's."""
    from mgpu_pipe.inference.open import load_run

    model = materialise(build_meta(pictured(tmp_path).model, CLASS), 1, "cpu")
    model.config.text_config.eos_token_id = None
    write_folder(model, tmp_path / "hf")
    given = ("model=hf", f"model.path={tmp_path / 'hf'}", f"data.tokenizer={write_tokenizer(tmp_path / 'tokenizer')}")
    first = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    whole = small_runs.run(pictured, tmp_path / "run", 1, *given, "strategy=single", *first)
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    resumed = small_runs.run(pictured, tmp_path / "resumed", 2, *given, "strategy=fsdp", resume=step)
    assert resumed["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    assert load_run(tmp_path / "run").model.config.text_config.eos_token_id is not None
