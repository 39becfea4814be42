"""BEIR's three files as pairs: judgements (``qrels/train.tsv``) with the texts of ``queries.jsonl`` and
``corpus.jsonl``, which lie next to their folder (Thakur et al. 2021, arXiv:2104.08663).

Each query of the judgements is a row with the documents that answer it, and their grades above 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu_pipe.data import files
from mgpu_pipe.data.compressed import open_text, table_suffix
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.tables import RowLines, row_lines
from mgpu_pipe.data.text.pair_columns import passage
from mgpu_pipe.errors import DataError

COLUMNS = ["query-id", "corpus-id", "score"]
QUERIES, CORPUS = "queries.jsonl", "corpus.jsonl"
GRADES = "grades"
"""Column of the grades of a row's positives."""


def text_files(path: Path) -> list[Path]:
    """Queries and corpus of a table of judgements; empty for any other file.

    Raises:
        DataError: one of both is not there.
    """
    if table_suffix(path) != ".tsv":
        return []
    try:
        with open_text(path) as file:
            head = file.readline(200).decode(errors="replace")
    except OSError:  # reading its rows refuses it
        return []
    if head.split() != COLUMNS:
        return []
    return [_near(path, name) for name in (QUERIES, CORPUS)]


def _near(path: Path, name: str) -> Path:
    places = [folder / f"{name}{ending}" for folder in (path.parent.parent, path.parent) for ending in ("", ".gz")]
    for place in places:
        if place.is_file():
            return place
    raise DataError(f"{path}: BEIR's {name} is not next to its folder; put it there")


def pair_lines(path: Path, expected: Fingerprint | None = None) -> RowLines:
    """Yields the rows of a file of pairs, or those that judgements of BEIR and their texts make."""
    return _join(path, expected) if text_files(path) else row_lines(path, expected, nested=True)


def _join(path: Path, expected: Fingerprint | None) -> RowLines:
    queries, corpus = text_files(path)
    judged: dict[str, dict[str, float]] = {}
    places: dict[str, tuple[str, int]] = {}
    for line, origin, size in row_lines(path, expected):
        row = files.json_row(line, origin)
        query, document, grade = (str(row[name]) for name in COLUMNS)
        places.setdefault(query, (origin, size))
        try:
            judged.setdefault(query, {})[document] = float(grade)
        except ValueError as error:
            raise DataError(f"{origin}: column 'score' holds {grade!r}, not a number; {files.FIX}") from error
    wanted = {document for grades in judged.values() for document, grade in grades.items() if grade > 0}
    texts = {number: text for number, text in read_texts(corpus) if number in wanted}
    questions = {number: text for number, text in read_texts(queries) if number in judged}
    for query, grades in judged.items():
        origin, size = places[query]
        right = {document: grade for document, grade in grades.items() if grade > 0}
        missing = [f"{CORPUS} has no document {document!r}" for document in right if document not in texts]
        if query not in questions:
            missing = [f"{QUERIES} has no query {query!r}"]
        if missing:
            yield files.BrokenRow(f"{missing[0]}; {files.FIX}"), origin, size
        elif right:
            columns = {"query": questions[query], "positive": [texts[document] for document in right]}
            yield json.dumps({**columns, GRADES: [*right.values()]}, ensure_ascii=False), origin, size


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of each line of queries or a corpus; the title stands before the text.

    Raises:
        DataError: a line has neither.
    """
    for line, origin, _ in row_lines(path):
        row: dict[str, Any] = files.json_row(line, origin)
        if "_id" not in row or not isinstance(row.get("text"), str):
            raise DataError(f"{origin}: has no columns '_id' and 'text'; {files.FIX}")
        yield str(row["_id"]), passage(row)
