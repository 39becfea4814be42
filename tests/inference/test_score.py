"""Documents scored by real processes. Oracle: sentence-transformers' ``CrossEncoder`` on the exported folder; of the
processes, a job of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgpu_pipe.cli.main import main
from mgpu_pipe.inference.batch import pair_scorer
from tests.data.support import write_jsonl
from tests.inference.support import WORDS
from tests.support.command import mgpu
from tests.support.pair_tokenizers import write_tokenizer

REASON = "sentence-transformers loads the exported folder: pip install sentence-transformers"
TEXTS = [" ".join(WORDS[(at * 3 + k) % len(WORDS)] for k in range(1 + at * at % 23)) for at in range(40)]
PAIRS: list[Any] = [
    {"query": TEXTS[at], "positive": TEXTS[at + 1], "negative": TEXTS[at + 2 : at + 2 + at % 4], "id": at}
    for at in range(20)
]
SEARCHES: list[Any] = [{"query": TEXTS[at], "documents": TEXTS[at + 1 : at + 9]} for at in range(12)]
ROWS = [*PAIRS, *SEARCHES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with runs of a reranker by tokenizer, their exports, and rows to score."""
    folder = tmp_path_factory.mktemp("score")
    write_jsonl(folder / "pairs.jsonl", PAIRS[1:])
    write_jsonl(folder / "rows.jsonl", ROWS)
    for kind in ("bert", "plain"):
        tokenizer = write_tokenizer(folder / f"{kind}-tokenizer", kind)
        data = ("data=embedding_pairs", "data.paths=[pairs.jsonl]", "data.seq_len=24", f"data.tokenizer={tokenizer}")
        model = ("model=bert_tiny", "model.config.vocab_size=44", "model.config.pad_token_id=0", "optimizer.lr=1e-2")
        small = ("strategy=single", "trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.devices=1")
        held_out = "data.validation_fraction=0"
        mgpu(cache, folder, *data, *model, *small, held_out, "objective=reranker", f"run.dir={kind}")
        mgpu(cache, folder, "export", kind, "--out", f"{kind}-exported")
    return folder


def scored(place: Path, model: str, name: str, *words: str, rows: str = "rows.jsonl") -> list[dict[str, Any]]:
    """Rows that a job of this process writes."""
    out = place / name
    assert main(["score", str(place / model), "--input", str(place / rows), "--output", str(out), *words]) == 0
    assert not out.with_name(f"{name}.unfinished").exists()
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["bert", "plain"])
def test_scores_are_those_of_sentence_transformers(place: Path, kind: str) -> None:
    library = pytest.importorskip("sentence_transformers", reason=REASON)
    published = library.CrossEncoder(str(place / f"{kind}-exported"), device="cpu")
    for model in (kind, f"{kind}-exported"):
        rows = scored(place, model, f"{model}.jsonl", "--batch-size", "7")
        assert [{**row, "scores": None} for row in rows] == [{**row, "scores": None} for row in ROWS]
        for row in rows:
            documents = row.get("documents") or [row["positive"], *row["negative"]]
            pairs = [(row["query"], document) for document in documents]
            expected = published.predict(pairs, activation_fn=torch.nn.Identity())
            np.testing.assert_allclose(row["scores"], expected, atol=1e-5)
    assert len({score for row in rows for score in row["scores"]}) > 20, "the scores are alike"


def test_processes_change_nothing(place: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_scorer, "ROWS_AT_ONCE", 64)
    scored(place, "bert", "one.jsonl")
    words = ("bert", "--input", "rows.jsonl", "--output", "two.jsonl", "--processes", "2", "trainer.accelerator=cpu")
    assert mgpu(cache, place, "score", *words) == ""
    assert (place / "two.jsonl").read_bytes() == (place / "one.jsonl").read_bytes()


def test_an_unfinished_job_computes_what_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_scorer, "ROWS_AT_ONCE", 8)
    scored(place, "bert", "whole.jsonl")
    compute, calls = pair_scorer.PairScorer.score, list[int]()

    def stop(self: Any, pairs: Any) -> Any:
        calls.append(len(pairs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(self, pairs)

    monkeypatch.setattr(pair_scorer.PairScorer, "score", stop)
    words = ["score", str(place / "bert"), "--input", str(place / "rows.jsonl"), "--output", str(place / "cut.jsonl")]
    assert main(words) not in (0, 2)
    assert main([*words, "--batch-size", "5"]) == 2
    assert main(words) == 0
    assert len(calls) == 3 + 2, "two of four batches were there"
    assert (place / "cut.jsonl").read_bytes() == (place / "whole.jsonl").read_bytes()


def test_an_encoder_learns_from_the_scores(place: Path, cache: Path) -> None:
    """Of rows with several positives too."""
    rows = [*PAIRS[1:4], {**PAIRS[5], "positive": [TEXTS[30], TEXTS[31]]}, {**PAIRS[6], "positive": TEXTS[32]}]
    write_jsonl(place / "taught.jsonl", [row for row in rows if row["negative"]])
    scored(place, "bert", "teacher.jsonl", rows="taught.jsonl")
    data = ("data=embedding_pairs", "data.paths=[teacher.jsonl]", "data.scores_column=scores")
    model = ("model=bert_tiny", "model.config.vocab_size=384", "objective=text_embedding", "objective.loss=kl")
    small = ("strategy=single", "trainer.accelerator=cpu", "trainer.max_steps=1", "data.global_batch_size=2")
    out = mgpu(cache, place, *data, *model, *small, "data.micro_batch_size=1", "data.validation_fraction=0")
    assert "training loss" in out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--input", "nosuch.jsonl"], "--input=nosuch.jsonl: no such file"),
        (["--output", "x.json"], "--output=x.json: unknown ending; let it end in .jsonl"),
        (["--output", "rows.jsonl"], "exists already"),
        (["--input", "lost.jsonl"], "lost.jsonl:2: has no column 'query'"),
        (["--input", "empty.jsonl"], "empty.jsonl:1: column 'documents' is empty"),
        (["--input", "several.jsonl"], "several.jsonl:1: column 'query' is a list of queries"),
        (["--input", "half.jsonl"], "half.jsonl:1: has no column 'positive'"),
        (["optimizer.lr=1"], "optimizer.lr=1: score takes trainer.devices"),
    ],
)
def test_wrong_jobs_are_a_line(
    place: Path, words: list[str], fault: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    write_jsonl(place / "lost.jsonl", [SEARCHES[0], {"documents": ["a"]}])
    write_jsonl(place / "empty.jsonl", [{"query": "a", "documents": []}])
    write_jsonl(place / "several.jsonl", [{"query": ["a", "b"], "documents": ["c"]}])
    write_jsonl(place / "half.jsonl", [{"query": "a", "negative": "c"}])
    default = [
        word for pair in (["--input", "rows.jsonl"], ["--output", "x.jsonl"]) if pair[0] not in words for word in pair
    ]
    assert main(["score", "bert", *default, *words]) == 2
    shown = capfd.readouterr().err
    assert fault in shown.replace(f"{place}/", "") and shown.count("\n") == 1, shown
    assert not list(place.glob("*.unfinished"))


def test_models_that_rank_nothing_are_refused(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = json.loads((place / "bert-exported" / "config.json").read_text())
    for name, fields in (
        ("classes", {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}),
        ("language", {"architectures": ["BertForMaskedLM"]}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file in (place / "bert-exported").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps({**whole, **fields}))
        words = ["--input", str(place / "rows.jsonl"), "--output", str(tmp_path / "x.jsonl")]
        assert main(["score", str(folder), *words]) == 2
        shown = capfd.readouterr().err
        assert "is no reranker, a ...ForSequenceClassification with one label" in shown and shown.count("\n") == 1
