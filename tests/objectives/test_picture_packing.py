"""Several conversations with pictures in one row. Oracle: each alone, by transformers' own model in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.checks.check_model import check_attention
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.objectives import test_own_sizes, test_parts, test_vision_language
from tests.objectives.test_vision_language import CLASS, run

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off")
PACKED = "data.packing=best_fit"


QWEN25, QWEN3, PARTS = "model=qwen25_vl_tiny", "model=qwen3_vl_tiny", "model=smolvlm_tiny"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chats", "overrides", "length", "many"),
    [
        (test_vision_language.chats, (), 96, (3, 5, 5)),
        pytest.param(test_own_sizes.chats, (QWEN25,), 160, (3, 6, 6), marks=pytest.mark.exhaustive),
        pytest.param(test_own_sizes.chats, (QWEN3,), 160, (3, 6, 6), marks=pytest.mark.exhaustive),
        pytest.param(test_parts.chats, (), 256, (2, 6, 22), marks=pytest.mark.exhaustive),
    ],
)
def test_rows_of_several_conversations_learn_what_each_alone_does(
    tmp_path: Path, chats: Any, overrides: tuple[str, ...], length: int, many: tuple[int, int, int]
) -> None:
    """Of files: the same tokens, pictures, loss and gradients; also where attention knows documents by their starts."""
    given = (*overrides, "data.validation_fraction=0", f"data.seq_len={length}", "data.shift=0")
    config, plain = chats(tmp_path, *given, PACKED), chats(tmp_path, *given, "data.packing=none")
    packs, alone = (prepare(one) for one in (config, plain))
    assert (packs.train_samples, alone.train_samples) == many[:2] and packs.digest != alone.digest
    rows, single = (known.open(one, "train") for known, one in ((packs, config), (alone, plain)))
    assert len(pickle.loads(pickle.dumps(rows))) == len(rows) == many[0]
    several, each = np.arange(len(rows)), np.arange(len(single))
    packed, apart = rows.batch(several, several), single.batch(each, each)
    shown = [one["grids"].any(-1) if "grids" in one else one["pictures"] for one in (packed, apart)]
    assert shown[0].sum() == shown[1].sum() == many[2]
    valid = rows.valid_units(several, several)
    assert valid == single.valid_units(each, each) == int((packed["labels"] != IGNORE_INDEX).sum())
    assert rows.padding(several) == many[0] * length - (many[1] * length - single.padding(each))
    places = packed["position_ids"] if packed["position_ids"].dim() == 2 else packed["position_ids"][:, 0]
    assert int((places == 0).sum()) == many[1] + many[0], "each conversation, and what is behind them"
    model_config = packs.complete(config).model
    found = []
    for kind, batch in (("plain", apart), ("packed", packed), ("starts", packed)):
        model: Any = materialise(build_meta(model_config, CLASS), 1, "cpu")
        if kind == "starts":
            assert use_packed_attention(model.get_decoder())
        objective = VisionLanguageObjective(model, None, lambda step: 1.0, 7, packed=kind != "plain")
        given_mask = objective.model_inputs(batch).get("attention_mask")
        assert (given_mask is not None) == (kind == "starts")
        loss = objective.micro_batch_loss(batch)
        loss.backward()
        found.append((loss.item(), {name: value.grad for name, value in model.named_parameters()}))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for name, gradient in gradients.items():
            expected = found[0][1][name]
            assert (gradient is None) == (expected is None)
            if gradient is not None:
                assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-6, name
    few = (*given[:-3], "data.validation_fraction=0.4")
    held, single_held = chats(tmp_path, *few, PACKED), chats(tmp_path, *few, "data.packing=none")
    known = prepare(held)
    assert known.validation_samples == len(known.open(held, "validation")) > 0
    assert known.validation_samples == prepare(single_held).validation_samples, "those have a row each"


def test_what_cannot_be_packed_is_refused() -> None:
    given = (*GIVEN, "model=llava_tiny", "data=digit_questions", PACKED)
    assert not (config := compose([*given])[0]).objective.data_errors(config.data, config.model)
    config = compose([*given, "model=paligemma_tiny"])[0]
    (error,) = config.objective.data_errors(config.data, config.model)
    assert str(error).startswith("data.packing=best_fit: paligemma reads questions from both sides")
    with pytest.raises(ConfigError, match=r"use none, or model\.attn_implementation=auto"):
        config = compose([*given, "model.attn_implementation=flash_attention_2"])[0]
        check_attention(config.model, config.data, config.objective)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_packed_run_answers_and_goes_on_as_one_process_does(tmp_path: Path) -> None:
    rows = (PACKED, "data.seq_len=96", "data.global_batch_size=2")
    whole = run(tmp_path / "whole", 1, "strategy=single", *rows)
    half = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    run(tmp_path / "first", 2, "strategy=ddp", *rows, *half)
    metrics = run(
        tmp_path / "second", 2, "strategy=fsdp", *rows, resume=tmp_path / "first" / "checkpoints" / "step-00000002"
    )
    frozen = (*rows, "model.freeze=[vision]")
    kept, seen = (
        run(tmp_path / name, 1, "strategy=single", *frozen, "data.shift=0", f"data.cache_features={name == 'kept'}")
        for name in ("kept", "seen")
    )
    for key in ("train/loss", "val/loss"):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-5)
        assert kept[key] == pytest.approx(seen[key], rel=1e-6), "features are kept by picture, not by row"
