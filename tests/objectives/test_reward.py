"""Reward models. Oracle: transformers' own classifier, one conversation at a time; TRL's loss stands in test_trl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.preference_keys import REWARD, RewardConfig
from mgpu_pipe.objectives.reward import RewardObjective, SeparateConversations
from tests.models.tiny import tiny_model
from tests.objectives.harness import PAIRS, answers_config, learnt_metrics
from tests.support.command import mgpu, run_folder


def small_data(folder: Path, *overrides: str, rows: list[Any] = PAIRS) -> RunConfig:
    return answers_config("reward", folder, "model.config.pad_token_id=0", *overrides, rows=rows)


def made(**keys: Any) -> RewardObjective:
    tiny = tiny_model("llama")
    shape = ModelConfig(type=tiny.type, config={**tiny.config, "num_labels": 1, "pad_token_id": 0})
    model = materialise(build_meta(shape, REWARD.model_class), 2, "cpu")
    return RewardObjective(model, None, lambda step: 1.0, RewardConfig(**keys))


def test_losses_and_metrics_are_those_of_single_conversations() -> None:
    objective = made(center_weight=0.2)
    model: Any = objective.model
    batch = objective.random_batch(3, 2, 5, 24, packed=True)
    assert batch["pair"].tolist() == [0, 1, 2, 3, -1], "the last pair counts nothing"
    rewards = torch.stack(
        [
            torch.stack([model(input_ids=ids[None, :length]).logits[0, 0] for ids, length in zip(*pair, strict=True)])
            for pair in zip(batch["input_ids"][:4], batch["lengths"][:4].tolist(), strict=True)
        ]
    )
    losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - batch["margin"][:4]) + 0.2 * rewards.sum(1) ** 2
    assert float(objective.micro_batch_loss(batch).detach()) == pytest.approx(float(losses.sum().detach()), rel=1e-5)
    right = float((rewards[:, 0] > rewards[:, 1]).sum())
    expected = [float(losses.sum().detach()), right, *rewards.detach().sum(0).tolist()]
    assert objective.evaluation_sums(batch).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_conversations_of_a_pair_become_rows(tmp_path: Path) -> None:
    config = small_data(tmp_path)
    packed = prepare(config).open(config, "train")
    separate, every = SeparateConversations(packed), np.arange(len(packed))
    whole, batch = packed.batch(every, every), separate.batch(every, every)
    assert batch["input_ids"].shape[:2] == (len(packed), 2)
    for row in every:
        joined = torch.cat([batch["input_ids"][row, side, : batch["lengths"][row, side]] for side in (0, 1)])
        assert torch.equal(joined, whole["input_ids"][row, : len(joined)])
    padding = torch.arange(batch["input_ids"].shape[2]) >= batch["lengths"].unsqueeze(2)
    assert int(batch["lengths"].max()) == batch["input_ids"].shape[2] and not batch["input_ids"][padding].any()


def test_margins_are_those_of_the_column(tmp_path: Path) -> None:
    rows = [{**pair, "margin": number / 4} for number, pair in enumerate(PAIRS)]
    config = small_data(tmp_path, rows=rows)
    samples = prepare(config).open(config, "train")
    every = np.arange(len(samples))
    batch, packed = SeparateConversations(samples).batch(every, every), samples.batch(every, every)
    assert len(set(batch["margin"].tolist())) == len(samples) and float(batch["margin"].max()) <= 23 / 4
    other = small_data(tmp_path)  # the same pairs without margins
    plain = SeparateConversations(prepare(other).open(other, "train")).batch(every, every)
    assert not plain["margin"].any() and torch.equal(plain["input_ids"], batch["input_ids"])
    lengths = (packed["rejected"] == 1).sum(1)
    for row, margin in enumerate(batch["margin"].tolist()):
        assert len(rows[round(margin * 4)]["rejected"]) <= int(lengths[row]), "the margin is another pair's"


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([{**PAIRS[0], "margin": "much"}], "pairs.jsonl:1: column 'margin' holds 'much', not a number"),
        ([{**PAIRS[0], "margin": 1}, PAIRS[1]], "pairs.jsonl:2: only some rows have a column 'margin'"),
    ],
)
def test_margins_that_are_no_numbers_are_refused(tmp_path: Path, rows: list[Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        prepare(small_data(tmp_path, rows=rows))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_learns_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    whole, longer = learnt_metrics(small_data, tmp_path)
    assert longer["val/accuracy"] == 1.0 and longer["val/margin"] > whole["val/margin"]


@pytest.mark.slow
def test_four_steps_of_the_experiment_evaluate_and_export(cache: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "logger=none", "data.numbers.count=200")
    out = mgpu(cache, tmp_path, "experiment=reward_style", "trainer.devices=2", "scheduler.warmup_steps=1", *short)
    assert "mgpu-pipe chat" not in out, "it scores answers and writes none"
    folder = run_folder(out)
    config = compose([f"data.cache_dir={cache}", "experiment=reward_style", *short])[0]
    samples = SeparateConversations(prepare(config).open(config, "validation"))
    every = np.arange(len(samples))
    batch = samples.batch(every, every)
    mgpu(cache, tmp_path, "export", str(folder), "--out", str(tmp_path / "exported"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert model.config.num_labels == 1 and model.score.weight.shape[0] == 1
    mask = torch.arange(batch["input_ids"].shape[2]) < batch["lengths"].flatten()[:, None]
    with torch.no_grad():
        rewards = model(batch["input_ids"].flatten(0, 1), attention_mask=mask.long()).logits.view(-1, 2)
    measured = mgpu(cache, tmp_path, "eval", str(folder))
    margin = float((rewards[:, 0] - rewards[:, 1]).mean())
    accuracy = 100 * float((rewards[:, 0] > rewards[:, 1]).float().mean())
    shown = {line.split()[0]: line.split()[1] for line in measured.splitlines() if len(line.split()) > 1}
    assert float(shown["margin"]) == pytest.approx(margin, abs=2e-6)
    assert shown["accuracy"] == f"{accuracy:.2f}%"
