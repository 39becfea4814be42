"""Preferences beside TRL: equal losses and gradients on the same batch."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.preference_keys import CPOConfig, ORPOConfig, SimPOConfig
from mgpu_pipe.objectives.preference_pairs import CPOObjective, ORPOObjective, SimPOObjective, documents_of_pairs
from tests.data.support import write_jsonl
from tests.models.tiny import tiny_model
from tests.objectives.harness import check_gradients, check_loss, gradients_of
from tests.objectives.test_kto import made, measured
from tests.objectives.test_reward import made as made_reward

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl", reason="the oracle of preferences: pip install trl")
GATHER = torch.Tensor.detach
ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=GATHER, gather=GATHER)


def assert_equal(model: Any, expected: torch.Tensor, loss: torch.Tensor) -> None:
    """Losses and every parameter's gradient agree to 1e-6 of the whole."""
    expected.backward()
    wanted = gradients_of(model)
    assert None not in wanted.values()
    model.zero_grad()
    loss.backward()
    check_loss(loss.detach(), expected, 1e-6)
    check_gradients(model, wanted, each=0, whole=1e-6)


def bare(trainer: type, **attributes: Any) -> Any:
    """A trainer of TRL with these attributes only."""
    made_trainer = object.__new__(trainer)
    vars(made_trainer).update(
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )
    return made_trainer


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_kto(shift: float) -> None:
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.utils import add_fused_lm_head

    weights = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    objective = made(**weights)
    model: Any = objective.model
    batch = objective.random_batch(3, 0, 6, 40, packed=True)
    batch["reference"][:, 1] += shift
    inputs: dict[str, Any] = {"label": batch["desirable"].bool()}
    inputs["ref_logps"], inputs["ref_KL_logps"] = batch["reference"].unbind(1)
    for prefix, theirs in (("", ""), ("unrelated_", "KL_")):
        ids, answer = batch[f"{prefix}input_ids"], batch[f"{prefix}labels"] != IGNORE_INDEX
        completion = torch.cat([torch.zeros_like(answer[:, :1]), answer[:, :-1]], 1).long()
        ends = completion.shape[1] - completion.flip(1).argmax(1)
        mask = torch.arange(ids.shape[1]) < ends.unsqueeze(1)
        inputs |= {f"{theirs}input_ids": ids, f"{theirs}attention_mask": mask.long()}
        inputs[f"{theirs}completion_mask"] = completion
    parts = measured(objective, batch, 4)
    mean = torch.stack([objective.micro_batch_loss(part) for part in parts]).sum() / len(batch["sample"])
    original = model.forward
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits"))
    trainer = bare(KTOTrainer, model=model, calculate_KL=True, precompute_ref_logps=True, loss_type="kto", **weights)
    expected = trainer._compute_loss(model, inputs, return_outputs=False)
    model.forward = original
    assert (float(trainer._metrics["train"]["kl"][0]) > 0) is (shift < 0)
    assert_equal(model, expected, mean)


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_reward(center: float) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    objective = made_reward(center_weight=center)
    batch = objective.random_batch(3, 0, 4, 24, packed=True)
    rows = {name: value.unflatten(0, (4, 2)) for name, value in objective.model_inputs(batch).items()}
    inputs = {name: torch.cat(list(value.unbind(1))) for name, value in rows.items()}
    inputs["margin"] = batch["margin"]
    settings = SimpleNamespace(center_rewards_coefficient=center or None)
    trainer = bare(RewardTrainer, model=objective.model, args=settings)
    expected = trainer.compute_loss(objective.model, inputs)
    assert_equal(objective.model, expected, objective.micro_batch_loss(batch) / 4)


def cpo(model: Any) -> tuple[Any, dict[str, Any]]:
    keys = CPOConfig(beta=0.2, chosen_weight=0.7, label_smoothing=0.1)
    theirs = {"beta": 0.2, "cpo_alpha": 0.7, "label_smoothing": 0.1, "loss_type": "sigmoid"}
    return CPOObjective(model, None, lambda step: 1.0, keys), theirs


def simpo(model: Any) -> tuple[Any, dict[str, Any]]:
    theirs = {"beta": 1.5, "cpo_alpha": 0, "label_smoothing": 0, "loss_type": "simpo", "simpo_gamma": 0.4}
    return SimPOObjective(model, None, lambda step: 1.0, SimPOConfig(beta=1.5, margin=0.4)), theirs


def orpo(model: Any) -> tuple[Any, dict[str, Any]]:
    return ORPOObjective(model, None, lambda step: 1.0, ORPOConfig(odds_weight=0.3)), {"beta": 0.3, "padding_value": 0}


def without_prompts(batch: dict[str, torch.Tensor]) -> None:
    """Every token but a document's first is answered: TRL's ORPO learns the prompt of a chosen answer too."""
    for row, documents in documents_of_pairs(batch):
        for document in documents:
            ids, labels = batch["input_ids"][row, document], batch["labels"][row, document]
            end = int((labels != IGNORE_INDEX).nonzero().max())
            labels[:end] = ids[1 : end + 1]


@pytest.mark.parametrize("build", [cpo, simpo, orpo])
def test_pairs_one_at_a_time(build: Any) -> None:
    """TRL's mean over the chosen tokens of a micro-batch is ours where a micro-batch is one pair."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    objective, keys = build(materialise(build_meta(tiny_model("llama")), 2, "cpu"))
    batch = objective.random_batch(3, 0, 4, 48, packed=True)
    if build is orpo:
        without_prompts(batch)
    kind = ORPOTrainer if build is orpo else CPOTrainer
    trainer = bare(kind, is_encoder_decoder=False, pad_token_id=0, alpha=0.0, **keys)
    losses = []
    for row, documents in documents_of_pairs(batch):
        pair = {}
        for side, document in zip(("chosen", "rejected"), documents, strict=True):
            ids, labels = batch["input_ids"][row, None, document], batch["labels"][row, None, document]
            shifted = torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, :-1]], 1)
            pair |= {f"{side}_input_ids": ids, f"{side}_labels": shifted}
            pair[f"{side}_attention_mask"] = torch.ones_like(ids)
        losses.append(trainer.get_batch_loss_metrics(objective.model, pair)[0])
    assert_equal(objective.model, torch.stack(losses).sum(), objective.micro_batch_loss(batch))


def chat(*said: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn, after a system message of the first word."""
    roles = ("system", *["user", "assistant"] * 3)
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


PAIRS = [
    {"chosen": chat("quick", "the quick?", "brown fox"), "rejected": chat("quick", "the quick?", " lazy  dog \n")},
    {"chosen": chat("", "a", "b b", "over?", "the"), "rejected": chat("", "a", "b b", "over?", " the fox")},
]
FORMS: dict[str, Any] = {
    "whole": lambda row: row,
    "prompt": lambda row: {
        "prompt": row["chosen"][:-1],
        **{side: row[side][-1:] for side in ("chosen", "rejected")},
        "score_chosen": 2.0,
    },
}


@pytest.mark.parametrize("template", ["llama3", "chatml", "qwen3"])
@pytest.mark.parametrize("form", list(FORMS))
def test_conversations_become_the_tokens_of_trl(tmp_path: Path, form: str, template: str) -> None:
    """TRL also trains the line break that a template writes after an answer's end, which both answers share."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.dpo_trainer import DPOTrainer

    rows = [FORMS[form](row) for row in PAIRS]
    words = ("model=llama_tiny", "model.config.vocab_size=400", "objective=dpo", "data=preferences_jsonl")
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    data = (f"data.paths=[{file}]", f"data.cache_dir={tmp_path / 'cache'}", "data.validation_fraction=0")
    config = compose([*words, *data, f"data.chat_template={template}", "data.seq_len=512"])[0]
    prepared: Any = prepare(config)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    settings = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    trainer = bare(DPOTrainer, _tokenizer=tokenizer, _is_vision_dataset=False)
    theirs = trainer._prepare_dataset(Dataset.from_list(rows), tokenizer, settings, "pairs")
    every = np.arange(len(rows))
    batch = prepared.open(config, "train").batch(every, every)
    for row, documents in documents_of_pairs(batch):
        expected = theirs[int(row)]
        for side, document in zip(("chosen", "rejected"), documents, strict=True):
            ids, labels = batch["input_ids"][row, document], batch["labels"][row, document]
            whole = [*expected["prompt_ids"], *expected[f"{side}_ids"]]
            assert ids[: len(whole)].tolist() == whole, "a separator of documents may follow"
            answer, trained = expected[f"{side}_ids"], labels[labels != IGNORE_INDEX].tolist()
            assert trained and answer[: len(trained)] == trained
            assert tokenizer.decode(answer[len(trained) :]) == ("" if template == "llama3" else "\n")
