"""Searches compared. Oracles: the formula of BM25, sentence-transformers' evaluator, and a run's held-out metrics."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from mgpu_pipe.cli.main import main
from mgpu_pipe.inference.batch.compare_searches import Bm25, measure_orders, words_of
from tests.data.support import write_jsonl
from tests.inference.support import WORDS
from tests.inference.test_encode import PROMPTS, REASON, place
from tests.support.command import mgpu

__all__ = ["PROMPTS", "place"]
ROW = re.compile(r"^(\S.*?) {2,}([\d.]+)% +([\d.]+) +([\d.]+)$", re.MULTILINE)


def figures(cache: Path, place: Path, *words: str) -> dict[str, tuple[float, ...]]:
    """The printed table: recall, MRR and NDCG of each search; then the last line."""
    said = mgpu(cache, place, "retrieve", *words, "--device", "cpu")
    rows = {name: (float(recall) / 100, *map(float, others)) for name, recall, *others in ROW.findall(said)}
    return {**rows, said.splitlines()[-1]: ()}


def test_scores_are_those_of_the_formula() -> None:
    documents = ["def readFile(path)", "HTTPServer reads a file", "def close(file, file)", "write"]
    assert words_of("readFile HTTPServer x2") == ["read", "file", "http", "server", "x", "2"]
    assert words_of("Über_café naïve 東京") == ["über", "café", "naïve", "東京"]
    index, split = Bm25(documents), [words_of(document) for document in documents]
    mean = sum(map(len, split)) / 4
    for number, words in enumerate(split):
        expected = 0.0
        for word in ("read", "file"):
            there, times = sum(word in other for other in split), words.count(word)
            rarity = math.log(1 + (4 - there + 0.5) / (there + 0.5))
            expected += rarity * times / (times + 1.5 * (0.25 + 0.75 * len(words) / mean))
        assert index.scores("read the file")[number] == pytest.approx(expected)


def test_metrics_are_those_of_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation", reason=REASON)
    chosen = np.random.default_rng(0)
    orders = [chosen.permutation(20).tolist() for _ in range(8)]
    right = [{int(number): 1.0 for number in chosen.choice(20, 1 + at % 12, replace=False)} for at in range(8)]
    queries = {str(at): "" for at in range(8)}
    wanted = {str(at): {str(number) for number in numbers} for at, numbers in enumerate(right)}
    evaluator = library.InformationRetrievalEvaluator(
        queries, {str(number): "" for number in range(20)}, wanted, mrr_at_k=[10], ndcg_at_k=[10]
    )
    found = [[{"corpus_id": str(n), "score": -place} for place, n in enumerate(order)] for order in orders]
    theirs = evaluator.compute_metrics(found)
    ours = measure_orders(orders, right)
    assert ours == pytest.approx([theirs["recall@k"][10], theirs["mrr@k"][10], theirs["ndcg@k"][10]])
    # The grade counts in NDCG alone: 3 at the second place, 1 at the first (TREC's gain).
    best, given = 3 + 1 / math.log2(3), 1 + 3 / math.log2(3)
    assert measure_orders([[5, 7]], [{5: 1.0, 7: 3.0}]) == pytest.approx([1, 1, given / best])


def test_a_runs_held_out_pairs_give_its_metrics(place: Path, cache: Path) -> None:
    said = figures(cache, place, "run")
    metrics = json.loads(mgpu(cache, place, "eval", "run", "--json"))["metrics"]
    names = ("recall@10", "mrr@10", "ndcg@10")
    expected = [next(value for key, value in metrics.items() if key.endswith(name)) for name in names]
    assert said["embeddings"] == pytest.approx(expected, abs=1e-3)


def test_a_reranker_orders_what_both_searches_find(
    place: Path, cache: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mgpu(cache, place, "mine", "run", "--output", str(tmp_path / "mined.jsonl"), "--device", "cpu")
    mined = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert all(row["negative"] and not row["query"].startswith("find: ") for row in mined)
    small = ("model=bert_tiny", "model.config.vocab_size=384", "strategy=single", "trainer.accelerator=cpu")
    words = ("objective=reranker", "data=embedding_pairs", f"data.paths=[{tmp_path}/mined.jsonl]", "data.seq_len=24")
    mgpu(cache, tmp_path, *small, *words, "trainer.devices=1", "trainer.max_steps=1", "run.dir=reranker")
    said = figures(cache, place, "run", "--reranker", str(tmp_path / "reranker"), "--candidates", "12")
    assert list(said)[:4] == ["BM25", "embeddings", "BM25 + reranker", "embeddings + reranker"]
    assert "the reranker orders the first 12 of each" in list(said)[4]
    capfd.readouterr()
    assert main(["retrieve", str(place / "run"), "--reranker", str(place / "run")]) != 0
    assert "learned objective=text_embedding; give a run of objective=reranker" in capfd.readouterr().err


def test_beir_is_searched_in_its_whole_corpus(place: Path, cache: Path, tmp_path: Path) -> None:
    corpus = [{"_id": str(at), "title": WORDS[at % 7], "text": f"{WORDS[at % 11]} unique{at}"} for at in range(40)]
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{at}", "text": f"unique {at}"} for at in range(5)])
    (tmp_path / "qrels").mkdir()
    judged = "".join(f"q{at}\t{at}\t2\nq{at}\t{at + 20}\t0\n" for at in range(4))
    (tmp_path / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    said = figures(cache, place, "exported", "--input", str(tmp_path / "qrels" / "test.tsv"))
    assert said["BM25"] == (1, 1, 1) and "4 queries, 40 documents" in said
