"""Rows of two texts. Oracle: the tokenizers library, which joins and cuts them itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.text.pair_template import adapt_to_pairs, kept_tokens, pair_template
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.objectives.reranker import RerankerObjective
from tests.data.support import write_jsonl
from tests.support.pair_tokenizers import KINDS, WORDS, write_tokenizer

SEQ_LEN = 14


def text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def rows_of(number: int, negatives: int = 3) -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [
        {
            "query": text(draw, 12),
            "positive": f"w0 {text(draw, 12)}",
            "negative": [f"w1 {text(draw, 12)}" for _ in range(at % (negatives + 1))],
        }
        for at in range(number)
    ]


def configured(tmp_path: Path, rows: list[Any], *words: str, kind: str = "bert") -> RunConfig:
    folder = tmp_path / kind
    if not folder.exists():
        write_tokenizer(folder, kind)
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    given = ("objective=reranker", "model=bert_tiny", "model.config.vocab_size=44", "data=embedding_pairs")
    paths = (f"data.paths=[{file}]", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenize_workers=1")
    more = (f"data.tokenizer={folder}", f"data.seq_len={SEQ_LEN}", "data.validation_fraction=0")
    return compose([*given, *paths, *more, "model.config.pad_token_id=0", *words])[0]


def samples_of(config: RunConfig) -> tuple[Any, Any]:
    prepared = prepare(config)
    return prepared, RerankerObjective.samples(config, prepared.open(config, "train"))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_tokenizers_library(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    rows = rows_of(24)
    config = configured(tmp_path, rows, kind=kind)
    prepared, samples = samples_of(config)
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    every = np.arange(len(rows))
    batch = samples.batch(every, every)
    adapt_to_pairs(tmp_path / kind, True)
    own = AutoTokenizer.from_pretrained(tmp_path / kind)
    cut = 0
    for at, row in enumerate(rows):
        documents = [row["positive"], *row["negative"]]
        assert (batch["lengths"][at] > 0).sum() == len(documents)
        for place, document in enumerate(documents):
            expected = own(row["query"], document, truncation=True, max_length=SEQ_LEN)
            length = int(batch["lengths"][at, place])
            assert batch["input_ids"][at, place, :length].tolist() == expected["input_ids"]
            assert batch["token_type_ids"][at, place, :length].tolist() == expected["token_type_ids"]
            assert not batch["input_ids"][at, place, length:].any()
            cut += len(own(row["query"], document)["input_ids"]) > SEQ_LEN
        assert own(row["query"])["input_ids"] == [*own.encode(row["query"])]
    assert cut > 10, "most rows are cut"
    assert samples.positions(every) - samples.padding(every) == int(batch["lengths"].sum())
    assert prepared.too_long_samples == sum(
        max(len(own(row["query"], document)["input_ids"]) for document in (row["positive"], *row["negative"])) > SEQ_LEN
        for row in rows
    )


@pytest.mark.parametrize("kind", ["first", "plain"])
def test_a_text_alone_stays_as_it_was(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / kind, kind)
    before, template = AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"], pair_template(folder)
    adapt_to_pairs(folder, False)
    own = AutoTokenizer.from_pretrained(folder)
    assert own("w1 w2")["input_ids"] == before
    assert set(own("w1", "w2")) == {"input_ids", "attention_mask"}
    assert pair_template(folder).specials == template.specials


def test_texts_are_cut_as_the_tokenizers_library_cuts_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "plain", "plain") / "tokenizer.json"))
    for room in range(2, 9):
        tokenizer.enable_truncation(room)
        for first in range(1, 10):
            for second in range(1, 10):
                texts = tokenizer.encode(" ".join(["w1"] * first), " ".join(["w2"] * second)).sequence_ids
                assert kept_tokens(first, second, room) == (texts.count(0), texts.count(1)), (first, second, room)


@pytest.mark.parametrize(
    ("loss", "terms"),
    [("binary", [[1, 0, 0], [1, 1, 0], [1, 1, 1]]), ("margin", [[0, 0, 0], [0, 1, 0], [0, 1, 1]])]
    + [("listwise", [[0, 0, 0], [1, 0, 0], [1, 0, 0]])],
)
def test_units_are_the_terms_of_the_loss(tmp_path: Path, loss: str, terms: list[list[int]]) -> None:
    config = configured(tmp_path, rows_of(3, negatives=2), f"objective.loss={loss}")
    _, samples = samples_of(config)
    every = np.arange(3)
    assert samples.batch(every, every)["terms"].tolist() == terms
    assert [samples.valid_units(every[at : at + 1], every[at : at + 1]) for at in range(3)] == list(map(sum, terms))


def test_long_rows_are_left_out_or_refused(tmp_path: Path) -> None:
    long = " ".join(["w2"] * 11)
    rows = [
        {"query": "w1 w2", "positive": "w3", "negative": "w4"},
        {"query": "w1", "positive": "w5", "negative": [long, "w6"]},
        {"query": long, "positive": "w5", "negative": "w6"},
    ]
    fitting = configured(tmp_path, rows, "data.seq_len=15", "data.on_too_long=refuse")
    assert prepare(fitting).too_long_samples == 0
    with pytest.raises(ConfigError, match=r"data\.seq_len=14: 2 of 3 rows are longer.*has 15 tokens"):
        prepare(configured(tmp_path, rows, "data.on_too_long=refuse"))
    assert len(samples_of(configured(tmp_path, rows, "data.on_too_long=drop"))[1]) == 1
    with pytest.raises(ConfigError, match=r"data\.seq_len=4: a text has special tokens; use at least 5"):
        prepare(configured(tmp_path, rows, "data.seq_len=4"))


def test_data_without_negatives_are_refused(tmp_path: Path) -> None:
    rows: list[Any] = [{"query": f"w{at}", "positive": f"w{at + 1}"} for at in range(12)]
    with pytest.raises(DataError, match="no row to train on has a negative, which objective=reranker ranks below"):
        prepare(configured(tmp_path, rows))
    held = write_jsonl(tmp_path / "held.jsonl", rows)
    with pytest.raises(DataError, match="no row held out has a negative"):
        prepare(configured(tmp_path, rows_of(8), f"data.validation_paths=[{held}]"))


def test_a_preview_marks_the_positive(tmp_path: Path) -> None:
    rows = [{"query": "w1 w2", "positive": "w3", "negative": "w4 w5"}]
    config = configured(tmp_path, rows)
    prepared, samples = samples_of(config)
    ((positive, negative),) = parts_of(prepared, samples, np.arange(1), np.arange(1), False)
    assert (positive.text, positive.trained) == ("[CLS] w1 w2 [SEP] w3 [SEP]", True)
    assert (negative.text, negative.trained) == ("[CLS] w1 w2 [SEP] w4 w5 [SEP]", False)
