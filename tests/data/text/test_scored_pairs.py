"""Pairs of sentences with scores: rows, their tensors, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.data_source import check_sources
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.errors import BadInputError, ConfigError, DataError
from tests.data.support import write_jsonl
from tests.support.sampling import one_in

ROWS: list[dict[str, Any]] = [
    {"sentence1": "a man plays", "sentence2": "a man sings", "score": 2.5},
    {"sentence1": "a dog runs", "sentence2": "a dog is running fast", "score": 5},
    {"sentence1": "it rains", "sentence2": "a cat sleeps", "score": "0"},
]


def configured(tmp_path: Path, rows: list[Any] = ROWS, *words: str, file: Path | None = None) -> RunConfig:
    given = ("objective=text_similarity", "model=bert_tiny", "model.config.vocab_size=300", "data=scored_pairs")
    path = file or write_jsonl(tmp_path / "scored.jsonl", rows)
    paths = (f"data.paths=[{path}]", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenize_workers=1")
    return compose([*given, *paths, "data.validation_fraction=0", "data.seq_len=16", *words])[0]


def batch_of(config: RunConfig) -> tuple[Any, Any, dict[str, Any]]:
    prepared = prepare(config)
    samples = prepared.open(config, "train")
    every = np.arange(len(samples))
    return prepared, samples, samples.batch(every, every)


def test_sentences_are_rows_with_their_scores(tmp_path: Path) -> None:
    prepared, samples, batch = batch_of(configured(tmp_path))
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (3, 2, 16),
        "lengths": (3, 2),
        "scores": (3,),
    }
    shown = parts_of(prepared, samples, np.arange(3), np.arange(3), False)
    assert [[part.text for part in row] for row in shown] == [
        ["a man plays", "a man sings", " \u2192 2.5"],
        ["a dog runs", "a dog is running fast", " \u2192 5"],
        ["it rains", "a cat sleeps", " \u2192 0"],
    ]


def test_csv_with_other_columns_holds_the_same(tmp_path: Path) -> None:
    table = tmp_path / "scored.csv"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "near"], *(list(row.values()) for row in ROWS)])
    columns = ("data.sentence1_column=a", "data.sentence2_column=b", "data.score_column=near")
    found = batch_of(configured(tmp_path, ROWS, *columns, file=table))[2]
    expected = batch_of(configured(tmp_path))[2]
    assert all((found[name] == expected[name]).all() for name in expected)


def test_a_row_that_is_left_out_takes_its_score_along(tmp_path: Path) -> None:
    rows = [ROWS[0], {**ROWS[1], "sentence2": " "}, ROWS[2], {**ROWS[0], "sentence1": "word " * 40}, ROWS[1]]
    words = ("data.on_bad_sample=skip", "data.on_too_long=drop")
    prepared, _, batch = batch_of(configured(tmp_path, rows, *words))
    assert batch["scores"].tolist() == [2.5, 0, 5] and (prepared.bad_samples, prepared.too_long_samples) == (1, 1)


BAD: list[tuple[Any, str]] = [
    ({**ROWS[0], "score": "much"}, "column 'score' holds 'much', not a number"),
    ({**ROWS[0], "score": None}, "column 'score' holds None, not a number"),
    ({**ROWS[0], "score": True}, "column 'score' holds True, not a number"),
    ({**ROWS[0], "score": "nan"}, "column 'score' holds 'nan', not a number"),
    ({**ROWS[0], "score": [1]}, "column 'score' holds [1], not a number"),
    ({**ROWS[0], "sentence1": " "}, "column 'sentence1' is empty"),
    ({**ROWS[0], "sentence2": 4}, "column 'sentence2' holds int, not a string"),
    ({"sentence1": "a", "score": 1}, "has no column 'sentence2'; set data.sentence2_column to one"),
    ({"sentence1": "a", "sentence2": "b"}, "has no column 'score'; set data.score_column to one"),
]


@pytest.mark.parametrize(("row", "reason"), one_in(3, BAD))
def test_a_bad_row_is_one_line_with_its_place(tmp_path: Path, row: Any, reason: str) -> None:
    with pytest.raises(DataError) as error:
        prepare(configured(tmp_path, [ROWS[0], row]))
    assert reason in str(error.value) and "scored.jsonl:2: " in str(error.value) and "\n" not in str(error.value)
    run = configured(tmp_path, [row, ROWS[0]])
    with pytest.raises(BadInputError, match=r"scored\.jsonl:1: "):
        check_sources(run.model, run.data)


def test_scores_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    same: list[Any] = [{**row, "score": 1} for row in ROWS]
    with pytest.raises(DataError, match="every score to train on is 1; give pairs that are more and less similar"):
        prepare(configured(tmp_path, same))
    held = write_jsonl(tmp_path / "held.jsonl", same)
    with pytest.raises(DataError, match="every score held out is 1"):
        prepare(configured(tmp_path, ROWS, f"data.validation_paths=[{held}]"))
    with pytest.raises(
        ConfigError, match=r"global_batch_size=1: the loss compares the pairs of a step; use at least 2"
    ):
        prepare(configured(tmp_path, ROWS, "data.global_batch_size=1", "data.micro_batch_size=1"))
    with pytest.raises(DataError, match="a score to train on is 5, no cosine; divide the scores"):
        prepare(configured(tmp_path, ROWS, "objective.loss=cosine"))
    halves = [{**row, "score": float(row["score"]) / 5} for row in ROWS]
    assert prepare(configured(tmp_path, halves, "objective.loss=cosine")).train_samples == 3
