"""Samples that do not fit follow one rule, ``data.on_too_long``, whatever the source; what is left out is counted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError, ConfigError, DataError
from tests.data.support import WORDS, config, write_jsonl

LENGTHS = (3, 4, 5, 150, 6, 200, 2, 3)
"""Words of an answer; two do not fit."""
SEQ_LEN = 100


def words(count: int, seed: int = 0) -> str:
    drawn = random.Random(seed * 1000 + count)
    return " ".join(drawn.choice(WORDS) for _ in range(count))


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def row_of(source: str, number: int, count: int) -> dict[str, Any]:
    question, answer = words(3, number), words(count, number)
    return {
        "chat_jsonl": chat(question, answer),
        "preferences_jsonl": {"prompt": question, "chosen": answer, "rejected": words(2, number + 50)},
        "unpaired_jsonl": {"prompt": question, "completion": answer, "label": number % 2 == 0},
        "pairs_jsonl": {"source": question, "target": answer},
        "labelled_jsonl": {"text": answer, "label": WORDS[number % 2]},
        "jsonl": {"text": answer},
    }[source]


def configured(tmp_path: Path, source: str, rule: str = "auto", lengths: tuple[int, ...] = LENGTHS) -> RunConfig:
    rows = [row_of(source, number, count) for number, count in enumerate(lengths)]
    data = {"seq_len": SEQ_LEN, "on_too_long": rule, "validation_fraction": 0.0}
    if source in ("chat_jsonl", "preferences_jsonl", "unpaired_jsonl"):
        data["chat_template"] = "chatml"
    paths = [str(write_jsonl(tmp_path / f"{source}.jsonl", rows))]
    return config(tmp_path, source=source, paths=paths, **data)


def trained_tokens(prepared: Prepared, run: RunConfig) -> int:
    samples = prepared.open(run, "train")
    every = np.arange(len(samples))
    return int((samples.batch(every, every)["labels"] != IGNORE_INDEX).sum())


@pytest.mark.parametrize(
    "source", ["chat_jsonl", "preferences_jsonl", "unpaired_jsonl", "pairs_jsonl", "labelled_jsonl"]
)
def test_what_has_an_answer_is_dropped_and_counted(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source)
    prepared = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long) == (2, "drop")
    short = tuple(count for count in LENGTHS if count < 50)
    rows = [row_of(source, number, count) for number, count in enumerate(LENGTHS) if count in short]
    fitting = replace(run, data=replace(run.data, paths=[str(write_jsonl(tmp_path / "short.jsonl", rows))]))
    fitting.data.tokenizer = str(prepared.tokenizer_folder)
    alone = prepare(fitting)
    assert prepared.train_samples == alone.train_samples and alone.too_long_samples == 0
    if source != "labelled_jsonl":
        assert trained_tokens(prepared, run) == trained_tokens(alone, fitting)
    plain = prepared.as_dict()
    assert plain["too_long_samples"] == 2 and plain["on_too_long"] == "drop"
    assert read_prepared(json.loads(json.dumps(plain))) == prepared
    assert "2 " in prepared.too_long(run.data) and "left out (data.on_too_long=drop)" in prepared.too_long(run.data)
    assert alone.too_long(fitting.data) == ""


def test_text_is_split_and_no_label_is_lost(tmp_path: Path) -> None:
    run = configured(tmp_path, "jsonl")
    prepared: Any = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long) == (2, "split")
    assert trained_tokens(prepared, run) == prepared.num_tokens - prepared.num_documents
    dropped: Any = prepare(replace(run, data=replace(run.data, on_too_long="drop")))
    assert dropped.train.documents == prepared.train.documents
    assert dropped.train_tokens < prepared.train_tokens and dropped.digest != prepared.digest


@pytest.mark.parametrize("source", ["jsonl", "chat_jsonl", "preferences_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_refused_with_number_longest_and_fix(tmp_path: Path, source: str) -> None:
    with pytest.raises(
        ConfigError, match=r"=100: 2 of 8 .* are longer, the longest \(number 6\) has \d+ tokens"
    ) as told:
        prepare(configured(tmp_path, source, "refuse"))
    most = int(str(told.value).split(" has ")[1].split()[0])
    key = told.value.key.removeprefix("data.")
    run = configured(tmp_path, source, "refuse")
    assert prepare(replace(run, data=replace(run.data, **{key: most}))).too_long_samples == 0


@pytest.mark.parametrize("source", ["jsonl", "chat_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_truncated_at_the_end(tmp_path: Path, source: str) -> None:
    run = configured(tmp_path, source, "truncate")
    run.data.packing = "none"
    prepared: Any = prepare(run)
    assert (prepared.too_long_samples, prepared.on_too_long, prepared.train_samples) == (2, "truncate", 8)
    samples, every = prepared.open(run, "train"), np.arange(8)
    batch = samples.batch(every, every)
    if source == "pairs_jsonl":
        labels = batch["labels"]
        assert labels.shape == (8, SEQ_LEN) and (labels[[3, 5], -1] == prepared.padding_token_id).all()
        assert int((labels != IGNORE_INDEX).sum()) == samples.valid_units(every, every)
    else:
        assert samples.padding(np.array([3, 5])) == 0


def test_a_conversation_cut_before_its_answer_is_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat("Hi", "Yes"), chat(words(200), "No")])
    for rule in ("truncate", "split"):
        run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template="chatml", validation_fraction=0.0)
        run.data.packing, run.data.on_too_long = "none", rule
        prepared = prepare(run)
        samples, every = prepared.open(run, "train"), np.arange(prepared.train_samples)
        assert len(every) == {"truncate": 1, "split": 2}[rule]
        assert ((samples.batch(every, every)["labels"] != IGNORE_INDEX).sum(1) > 0).all()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        *(("labelled_jsonl", "split"), ("pairs_jsonl", "split"), ("embedding_pairs", "split")),
        ("scored_pairs", "split"),
        *(("preferences_jsonl", rule) for rule in ("split", "truncate")),
        *(("picture_chats", rule) for rule in ("split", "truncate")),
        *(("captions", "split"), ("audio_list", "truncate")),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_before_the_start(source: str, rule: str) -> None:
    run = RunConfig()
    run.data.source, run.data.on_too_long = source, rule
    with pytest.raises(
        BadInputError, match=f"data.on_too_long={rule}: data.source={source}: .*; (use auto, refuse|leave it at auto)"
    ):
        check_rule(run.data)


@pytest.mark.parametrize("source", ["chat_jsonl", "preferences_jsonl", "pairs_jsonl", "labelled_jsonl"])
def test_nothing_left_is_one_line(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match="nothing to train on") as told:
        prepare(configured(tmp_path, source, lengths=(150, 200)))
    assert "\n" not in str(told.value)


def test_data_whose_samples_all_fit_is_named_as_before(tmp_path: Path) -> None:
    """A run folder of an earlier version goes on."""
    found = [prepare(configured(tmp_path, "chat_jsonl", rule, lengths=(3, 4, 5))).digest for rule in ("auto", "split")]
    assert found[0] == found[1]


@pytest.mark.parametrize("source", ["preferences_jsonl", "unpaired_jsonl"])
def test_answers_to_a_prompt_stand_on_one_side(tmp_path: Path, source: str) -> None:
    said = [{"prompt": words(3, 3 * at), "answer": f"{WORDS[turn]} {at}"} for at in range(30) for turn in range(2)]
    rows: list[dict[str, Any]] = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": WORDS[2]}
        if source == "preferences_jsonl"
        else {"prompt": row["prompt"], "completion": row["answer"], "label": at % 2 == 0}
        for at, row in enumerate(said)
    ]
    paths = [str(write_jsonl(tmp_path / "rows.jsonl", rows))]
    prepared: Any = prepare(
        config(tmp_path, source=source, paths=paths, chat_template="chatml", seq_len=SEQ_LEN, validation_fraction=0.4)
    )
    train, held = ({rows[at]["prompt"] for at in prepared.documents(split)} for split in ("train", "validation"))
    assert train and held and not train & held
