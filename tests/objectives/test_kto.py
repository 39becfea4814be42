"""KTO. Oracle: the formulas of arXiv:2402.01306 over transformers' own model, one answer at a time, with the mismatched
answers that TRL 1.16 pairs prompts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.data.text.preference_rows import unpaired_of
from mgpu_pipe.data.text.preferences import PreparedUnpaired, unrelated_samples
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.kto import KTOObjective
from mgpu_pipe.objectives.preference_keys import KTOConfig
from tests.models.tiny import tiny_model
from tests.objectives.harness import answers_config, check_gradients, cut, gradients_of, learnt_metrics, step_loss

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"What is {number} and {number}?",
        "completion": f"It is {2 * number}, my friend." if good else f"{2 * number}" + "!" * (number % 4),
        "label": good,
    }
    for number in range(24)
    for good in ([True, False] if number % 3 else [True])
]


def small_data(folder: Path, *overrides: str, rows: list[Any] = ROWS) -> RunConfig:
    return answers_config("kto", folder, "data=unpaired_jsonl", "data.seq_len=64", *overrides, rows=rows)


def made(**keys: Any) -> KTOObjective:
    model = materialise(build_meta(tiny_model("llama")), 2, "cpu")
    return KTOObjective(model, None, lambda step: 1.0, KTOConfig(**keys))


def log_probability(model: Any, batch: dict[str, torch.Tensor], row: int, prefix: str = "") -> torch.Tensor:
    """Log-probability of a row's answer, read without its padding."""
    labels = batch[f"{prefix}labels"][row]
    places = (labels != IGNORE_INDEX).nonzero().flatten()
    logits = model(input_ids=batch[f"{prefix}input_ids"][row, None, : int(places[-1]) + 2]).logits[0]
    shares: torch.Tensor = logits.double().log_softmax(-1)
    return shares[places, labels[places]].sum()


def measured(objective: KTOObjective, batch: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of ``size`` rows, after their reference point was measured."""
    count = len(batch["sample"])
    parts = cut(batch, size)
    step = StepBatch(0, 0, count, parts, int((batch["sample"] >= 0).sum()))
    with torch.no_grad():
        objective.measure_step(step, lambda read: sum(map(objective.evaluation_sums, read.micro_batches)))  # type: ignore[arg-type, return-value]
    return parts


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("point_is_positive", [True, False])
def test_loss_gradients_and_metrics_are_those_of_the_paper(size: int, point_is_positive: bool) -> None:
    beta, good_weight, bad_weight = 0.3, 1.4, 0.6
    objective = made(beta=beta, desirable_weight=good_weight, undesirable_weight=bad_weight)
    model: Any = objective.model
    batch = objective.random_batch(3, 2, 5, 40, packed=True)
    assert batch["sample"].tolist() == [0, 1, 2, 3, -1], "the last answer counts nothing"
    batch["desirable"] = torch.tensor([1, 0, 1, 0, 1])
    with torch.no_grad():
        for row in range(5):
            batch["reference"][row, 0] = log_probability(model, batch, row) + 0.7 - row
            shift = 1.3 - row if point_is_positive else 2.0 + row
            batch["reference"][row, 1] = log_probability(model, batch, row, "unrelated_") + shift
    gains = [-(1.3 - row) if point_is_positive else -(2.0 + row) for row in range(4)]
    point = max(0.0, sum(gains) / 4)
    assert (point > 0) is point_is_positive
    losses, rewards = [], []
    for row in range(4):
        gain = log_probability(model, batch, row) - batch["reference"][row, 0]
        good = int(batch["desirable"][row])
        value = torch.sigmoid(beta * (gain - point)) if good else torch.sigmoid(beta * (point - gain))
        losses.append((good_weight if good else bad_weight) * (1 - value))
        rewards.append(beta * float(gain.detach()))
    expected = torch.stack(losses).sum()
    expected.backward()
    wanted = gradients_of(model)
    model.zero_grad()
    parts = measured(objective, batch, size)
    assert objective.training, "measuring leaves the mode as it was"
    assert float(step_loss(objective, parts)) == pytest.approx(float(expected.detach()), rel=1e-6)
    check_gradients(model, wanted, each=0, whole=1e-6)
    sums = sum(objective.evaluation_sums(part) for part in parts)
    assert isinstance(sums, torch.Tensor)
    right = sum((reward > beta * point) is (row % 2 == 0) for row, reward in enumerate(rewards))
    metrics = [right, rewards[0] + rewards[2], 2, rewards[1] + rewards[3], 4 * point]
    assert sums.tolist() == pytest.approx([float(expected.detach()), *metrics], rel=1e-5, abs=1e-5)


def test_what_counts_nothing_has_no_gradient() -> None:
    objective = made()
    objective.micro_batch_loss(objective.batch_spec.empty(16, torch.device("cpu"))).backward()
    assert all(value.grad is None or not value.grad.any() for value in objective.model.parameters())


def test_an_answer_stands_in_for_that_of_the_next_prompt() -> None:
    assert unrelated_samples(np.array([5, 6, 7], np.uint64)).tolist() == [2, 0, 1], "as TRL rotates them"
    assert unrelated_samples(np.array([5, 5, 6, 6, 7, 5], np.uint64)).tolist() == [4, 4, 1, 1, 3, 4]
    assert unrelated_samples(np.array([5, 5], np.uint64)).tolist() == [1, 0], "one prompt alone has no other"


def test_rows_hold_the_prompt_with_its_answer_and_with_anothers(tmp_path: Path) -> None:
    config = small_data(tmp_path)
    prepared = prepare(config)
    assert isinstance(prepared, PreparedUnpaired) and prepared.tokenizer_folder is not None
    assert prepared.train_samples + prepared.held_out_samples == len(ROWS) == prepared.num_samples
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    samples = prepared.open(config, "train")
    every = np.arange(len(samples))
    batch = samples.batch(every, every)
    assert int(batch["desirable"].sum()) == prepared.desirable
    answers = []
    for row in every:
        text, said = (
            tokenizer.decode(ids[ids != IGNORE_INDEX].tolist(), skip_special_tokens=True)
            for ids in (batch["input_ids"][row], batch["labels"][row])
        )
        known = next(known for known in ROWS if known["prompt"] in text and known["completion"] == said.strip())
        assert int(batch["desirable"][row]) == known["label"]
        answers.append((known["prompt"], batch["labels"][row][batch["labels"][row] != IGNORE_INDEX]))
    for row, (prompt, _) in enumerate(answers):
        other = batch["unrelated_labels"][row]
        other = other[other != IGNORE_INDEX]
        assert prompt in tokenizer.decode(batch["unrelated_input_ids"][row].tolist())
        found = [at for at, (_, answer) in enumerate(answers) if torch.equal(answer, other)]
        assert found and any(answers[at][0] != prompt for at in found)


ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b"}, "no column 'label'"),
    ({"prompt": "a", "completion": "b", "label": 2}, "not true or false"),
    ({"prompt": "a", "completion": "b", "label": None}, "not true or false"),
    ({"prompt": "a", "label": True}, "no column 'completion'"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs are read by data=preferences_jsonl, for objective=dpo"),
    ({"messages": [ASKED, SAID, ASKED], "label": True}, "completion must begin with the assistant's message"),
    ({"prompt": "a", "completion": "", "label": True}, "is empty"),
    ({"completion": "b", "label": True}, "has no prompt"),
    ({"prompt": "a", "completion": [{"role": "user", "content": "b"}], "label": True}, "must begin with the assistant"),
]


@pytest.mark.parametrize(("row", "fault"), BROKEN)
def test_a_row_that_is_no_labelled_answer_is_refused(row: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        unpaired_of(row, "rows.jsonl:1", "messages")


@pytest.mark.parametrize(
    ("label", "expected"), [(True, True), (0, False), (1.0, True), ("TRUE", True), ("false", False)]
)
def test_labels_are_booleans_numbers_or_texts(label: object, expected: bool) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": {"role": "assistant", "content": "b"}}
    messages, desirable = unpaired_of({**row, "label": label}, "rows.jsonl:1", "messages")
    assert desirable is expected
    assert [message.get("train") for message in messages] == [False, None]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID], "label": True},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "kto_tag": True},
    ],
)
def test_the_last_message_of_a_conversation_is_the_labelled_answer(row: dict[str, Any]) -> None:
    assert unpaired_of(row, "rows.jsonl:1", "messages") == ([{**ASKED, "train": False}, SAID], True)


def test_answers_of_one_label_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="give answers of both labels"):
        prepare(small_data(tmp_path, rows=[row for row in ROWS if row["label"]]))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_learns_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    whole, longer = learnt_metrics(small_data, tmp_path)
    assert longer["val/loss"] < 0.9 * whole["val/loss"]
    assert longer["val/margin"] > whole["val/margin"] and longer["val/accuracy"] > 0.8
