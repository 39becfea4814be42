"""Several conversations with pictures in one row. Oracle: each alone, by transformers' own model in one process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.checks.model import check_attention
from mgpu_pipe.config.compose import compose
from mgpu_pipe.data.prepare import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.objectives.test_contrastive import verified
from tests.objectives.test_vision_language import CLASS, GIVEN, chats, run
from tests.support.processes import run_processes
from tests.verify.support import small_run

PACKED = "data.packing=best_fit"


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (1, ("strategy=single", "data.micro_batch_size=2")),
        pytest.param(2, ("strategy=ddp", "data.micro_batch_size=2"), marks=pytest.mark.slow),
        (2, ("strategy=fsdp",)),
        pytest.param(2, ("strategy=tp",), marks=pytest.mark.slow),
        pytest.param(2, ("strategy=zero3",), marks=pytest.mark.slow),
        pytest.param(2, ("strategy=pp",), marks=pytest.mark.slow),
    ],
)
def test_packed_conversations_are_one_process_and_each_alone(processes: int, strategy: tuple[str, ...]) -> None:
    config = small_run(*GIVEN, PACKED, f"trainer.devices={processes}", *strategy)
    assert config.data.packing == "best_fit"
    worst = run_processes(processes, verified, config)[0]
    assert [one.quantity for one in worst] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert [one for one in worst if not one.passed] == []


def test_rows_of_several_conversations_learn_what_each_alone_does(tmp_path: Path) -> None:
    """Of files: the same tokens, pictures, loss and gradients; also where attention knows documents by their starts."""
    given = ("data.validation_fraction=0", "data.seq_len=96", "data.shift=0")
    config, plain = chats(tmp_path, *given, PACKED), chats(tmp_path, *given)
    packs, alone = (prepare(one) for one in (config, plain))
    assert (packs.train_samples, alone.train_samples) == (3, 5) and packs.digest != alone.digest
    rows, single = (known.open(one, "train") for known, one in ((packs, config), (alone, plain)))
    assert len(pickle.loads(pickle.dumps(rows))) == len(rows) == 3
    several, each = np.arange(len(rows)), np.arange(len(single))
    packed, apart = rows.batch(several, several), single.batch(each, each)
    assert packed["pictures"].sum() == apart["pictures"].sum() == 5
    valid = rows.valid_units(several, several)
    assert valid == single.valid_units(each, each) == int((packed["labels"] != IGNORE_INDEX).sum())
    assert rows.padding(several) == 3 * 96 - (5 * 96 - single.padding(each))
    assert int((packed["position_ids"] == 0).sum()) == 5 + 3, "each conversation, and what is behind them"
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
    held = chats(tmp_path, "data.validation_fraction=0.4", PACKED)
    known = prepare(held)
    assert known.validation_samples == len(known.open(held, "validation")) == 2, "those have a row each"


def test_what_cannot_be_packed_is_refused() -> None:
    given = (*GIVEN, "data=digit_questions", PACKED)
    assert not compose([*given])[0].objective.run_errors(compose([*given])[0])
    config = compose([*given, "model=qwen25_vl_tiny"])[0]
    (error,) = config.objective.run_errors(config)
    assert str(error).startswith("data.packing=best_fit: of conversations with pictures those for llava")
    with pytest.raises(ConfigError, match=r"use none, or model\.attn_implementation=auto"):
        check_attention(compose([*given, "model.attn_implementation=flash_attention_2"])[0])


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
