"""Rows of two sentences and a score: how similar they are."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.embedding_keys import ScoredPairsConfig
from mgpu_pipe.data.text.file_source import text_of
from mgpu_pipe.errors import DataError


def scored_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    """Makes the document of a row: its sentences, a JSON list. The first one decides the held-out split.

    Raises:
        DataError: the row is broken, a sentence is empty, or the score is no number.
    """
    keys = cast(ScoredPairsConfig, data)
    columns = {
        f"data.sentence{number}_column": name
        for number, name in ((1, keys.sentence1_column), (2, keys.sentence2_column))
    }
    row = files.json_row(line, origin, *columns.values(), keys.score_column)
    texts = [text_of(row, key, column, origin) for key, column in columns.items()]
    for text, column in zip(texts, columns.values(), strict=True):
        if not text.strip():
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
    score = _score(row, keys.score_column, origin)
    return Document(json.dumps(texts, ensure_ascii=False), origin, size, score=score, key=texts[0])


def check_scored_row(data: DataConfig, line: str, origin: str) -> None:
    """Checks a row of a file; raises as :func:`scored_document` does."""
    scored_document(data, line, origin, 0)


def _score(row: dict[str, Any], column: str, origin: str) -> float:
    """The score of a row; CSV holds texts."""
    if column not in row:
        raise files.missing_column(origin, "data.score_column", column, list(row))
    return finite_number(row[column], column, origin)


def finite_number(value: Any, column: str, origin: str) -> float:
    """The number that ``value`` is, or that its text says.

    Raises:
        DataError: it is none, or not finite.
    """
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{origin}: column '{column}' holds {value!r}, not a number; {files.FIX}")
    return score
