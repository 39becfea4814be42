"""Reads the rows that a reranker scores: a query and its documents; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig, check_pair_row, texts_of
from mgpu_pipe.data.text.beir import pair_lines
from mgpu_pipe.data.text.pair_columns import pair_row
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.objectives.vector_keys import RerankerConfig

KEYS = EmbeddingPairsConfig()
"""Names of the columns."""
DOCUMENTS = "documents"
"""Column of the documents of a row that says nothing of which are right."""


@dataclass(frozen=True)
class ScoredRow:
    """A query with the documents to score.

    Attributes:
        line: number of its row, from 1.
        columns: the row as the file has it.
    """

    line: int
    query: str
    documents: tuple[str, ...]
    columns: dict[str, Any]


def read_scored_rows(path: Path) -> Iterator[ScoredRow]:
    """Yields the rows of a file; the documents are those of ``documents``, or the positives and then the negatives.

    Raises:
        DataError: a row is broken, or lacks a query or documents.
    """
    columns = (*KEYS.text_columns(), DOCUMENTS)
    for number, (line, origin, _) in enumerate(pair_lines(path), start=1):
        row = pair_row(line, origin, columns)
        if DOCUMENTS not in row:
            check_pair_row(KEYS, line, origin)
            documents = [
                *texts_of(row[KEYS.positive_column], KEYS.positive_column, origin),
                *texts_of(row.get(KEYS.negative_column), KEYS.negative_column, origin, least=0),
            ]
        elif KEYS.query_column in row:
            documents = texts_of(row[DOCUMENTS], DOCUMENTS, origin)
        else:
            raise DataError(f"{origin}: has no column '{KEYS.query_column}'; {files.FIX}")
        query, *others = texts_of(row[KEYS.query_column], KEYS.query_column, origin)
        if others:
            raise DataError(f"{origin}: column '{KEYS.query_column}' is a list of queries; {files.FIX}")
        yield ScoredRow(number, query, tuple(documents), row)


def count_rows(path: Path) -> int:
    """Number of the rows of a file, which are all read; errors: see :func:`read_scored_rows`."""
    return sum(1 for _ in read_scored_rows(path))


def require_reranker(source: ModelSource) -> None:
    """Refuse a model that is no reranker.

    Raises:
        BadInputError: its run learned another objective, or the model of a folder has not the one output of a score.
    """
    if source.config is not None:
        if not isinstance(source.config.objective, RerankerConfig):
            learned = source.config.objective.name
            raise BadInputError(f"{source.folder}: learned objective={learned}; give a run of objective=reranker")
        return
    fields = resolved_fields(ModelConfig(name=source.folder.name, path=str(source.folder)))
    classes = fields.get("architectures") or []
    labels = len(fields.get("id2label") or ()) or fields.get("num_labels", 2)  # transformers' default
    if not any(str(name).endswith("ForSequenceClassification") for name in classes) or labels != 1:
        raise BadInputError(
            f"{source.folder}: is no reranker, a ...ForSequenceClassification with one label; export a run of "
            "objective=reranker, or save a CrossEncoder by sentence-transformers"
        )
