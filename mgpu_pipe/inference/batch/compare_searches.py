"""Measures how well queries find their documents: :func:`compare_searches` is the page to read first.

BM25 is that of Lucene (Robertson and Zaragoza 2009) over the words of identifiers. Recall is the share of a query's
right documents among the first ten; the metrics are those of ``objective=text_embedding``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.text.beir import GRADES, read_texts, text_files
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.mine_negatives import encode_sides, nearest, number_texts, read_pairs, rows_of_run
from mgpu_pipe.inference.batch.pair_scorer import PairScorer
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.objectives.vector_keys import MOST_RANK

SATURATION, LENGTH_SHARE = 1.5, 0.75
"""BM25's k1 and b."""
WORD = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+")
"""A word: HTTP and Server of ``HTTPServer``, read and file of ``read_file``."""
METRICS = (f"recall@{MOST_RANK}", f"MRR@{MOST_RANK}", f"NDCG@{MOST_RANK}")


def compare_searches(
    run: LoadedRun, source: ModelSource, pairs: Path | None, reranker: LoadedRun | None, candidates: int, batch: int
) -> tuple[list[tuple[str, list[float]]], int, int]:
    """The metrics of each search, and the numbers of queries and documents.

    Args:
        pairs: file of the rows; None takes the pairs that the run held out.
        reranker: orders the first ``candidates`` documents of each search anew.
        batch: texts or pairs in a forward pass.
    """
    rows = list(rows_of_run(run, "validation") if pairs is None else read_pairs(pairs))
    if not rows:
        raise BadInputError(f"{run.source}: the run holds out no pairs; give a file of pairs by --input")
    queries, documents, positives, _ = number_texts(rows)
    right = [dict.fromkeys(numbers, 1.0) for numbers in positives]
    if pairs is not None and (files := text_files(pairs)):  # BEIR searches its whole corpus
        for line, (_, text) in enumerate(read_texts(files[1]), start=1):
            if text:
                documents.setdefault(text, line)
        right = _grade(rows, list(documents))
    most = min(max(MOST_RANK, candidates), len(documents))
    vectors = encode_sides(run, source, pairs or run.source, queries, documents, batch)
    orders = {
        "BM25": Bm25(list(documents)).search(list(queries), most),
        "embeddings": nearest(*vectors, [set() for _ in queries], None, most)[1],
    }
    if reranker is not None:
        scorer, texts = PairScorer(reranker, batch), list(documents)
        for name in list(orders):
            orders[f"{name} + reranker"] = [
                _rerank(scorer, query, order, texts) for query, order in zip(queries, orders[name], strict=True)
            ]
    measured = [(name, measure_orders(order, right)) for name, order in orders.items()]
    return measured, len(queries), len(documents)


def _grade(rows: Sequence[Mapping[str, Any]], documents: Sequence[str]) -> list[dict[int, float]]:
    """Grades of each query's right documents by their numbers."""
    numbers, grades = {text: number for number, text in enumerate(documents)}, dict[str, dict[int, float]]()
    for row in rows:
        of_query = grades.setdefault(row["query"], {})
        of_query |= {numbers[text]: grade for text, grade in zip(row["positive"], row[GRADES], strict=True)}
    return list(grades.values())


def _rerank(scorer: PairScorer, query: str, order: Sequence[int], texts: Sequence[str]) -> list[int]:
    scores = scorer.score([(query, texts[number]) for number in order])
    return [order[place] for place in sorted(range(len(order)), key=lambda place: (-scores[place], place))]


def measure_orders(orders: Sequence[Sequence[int]], right: Sequence[Mapping[int, float]]) -> list[float]:
    """:data:`METRICS` over all queries.

    Args:
        orders: documents of each query, best first.
        right: documents that each query is to find, with their grades, which weigh in NDCG.
    """
    gains = 1 / np.log2(np.arange(2, MOST_RANK + 2))
    sums = np.zeros(len(METRICS))
    for order, wanted in zip(orders, right, strict=True):
        grades = np.array([wanted.get(number, 0.0) for number in order[:MOST_RANK]])
        first = 1 / (float((grades > 0).argmax()) + 1) if grades.any() else 0.0
        best = np.sort([*wanted.values()])[::-1][:MOST_RANK]
        gained, ideal = float(grades @ gains[: len(grades)]), float(best @ gains[: len(best)])
        sums += (float((grades > 0).sum()) / len(wanted), first, gained / ideal)
    return [float(value) for value in sums / len(right)]


class Bm25:
    """An index of the words of ``documents``."""

    def __init__(self, documents: Sequence[str]) -> None:
        counts = [Counter(words_of(document)) for document in documents]
        lengths = np.array([count.total() for count in counts], np.float64)
        norms = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * lengths / max(lengths.mean(), 1e-9))
        postings: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                postings.setdefault(word, []).append((number, times))
        self._number, self._weights = len(documents), dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]()
        for word, entries in postings.items():
            numbers, times = np.array(entries, np.int64).T
            rarity = np.log(1 + (len(documents) - len(entries) + 0.5) / (len(entries) + 0.5))
            self._weights[word] = (numbers, rarity * times / (times + norms[numbers]))

    def search(self, queries: Sequence[str], most: int) -> list[list[int]]:
        """The ``most`` best documents of each query, best first; equal ones in their order."""
        return [np.argsort(-self.scores(query), kind="stable")[:most].tolist() for query in queries]

    def scores(self, query: str) -> NDArray[np.float64]:
        """A score of each document."""
        scores = np.zeros(self._number)
        for word in words_of(query):
            if word in self._weights:
                numbers, weights = self._weights[word]
                scores[numbers] += weights
        return scores


def words_of(text: str) -> list[str]:
    """Words of a text in lower case; identifiers are split."""
    return [word.lower() for word in WORD.findall(text)]
