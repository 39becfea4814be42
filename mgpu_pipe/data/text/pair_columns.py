"""Columns of pairs as published sets have them, by the names of ``data=embedding_pairs``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mgpu_pipe.data import files
from mgpu_pipe.data.file_lists import PYTHON_LIST
from mgpu_pipe.data.text.earlier_versions import AGAIN, ANEW
from mgpu_pipe.errors import DataError

PUBLISHED = (
    ("anchor", "question", "sent0"),
    ("pos", "answer", "positive_passages", "positive_ctxs", "sent1"),
    ("neg", "negative_passages", "hard_negative_ctxs", "hard_neg"),
)
"""Other names of a query, a positive and a negative: those of sentence-transformers, FlagEmbedding, Tevatron, DPR and
SimCSE, where ``data`` names no other columns than :data:`USUAL`. A row's own column goes before them."""
USUAL = ("query", "positive", "negative")
SCORES, SCORES_OF_SIDES = "scores", ("pos_scores", "neg_scores")
"""Column of a teacher's scores as ``mgpu-pipe score`` writes it, and FlagEmbedding's two, which become it."""
IDS = ("query-id", "corpus-id", "_id")
"""Columns of the three files of BEIR, none of which holds a pair."""
TEACHING = ("label", "gold_label", "is_duplicate")
"""Columns that may say that a pair is wrong."""
WRONG = ("neutral", "contradiction", "-", "false")
"""Values of such columns, next to numbers, that do not say that a pair is right; any other text is a topic."""

_SEPARATED = re.compile(r"\.[ct]sv\b.*:\d+$", re.IGNORECASE)
"""Origin of a row in a table whose fields are texts."""


def pair_row(line: str, origin: str, columns: Sequence[str]) -> dict[str, Any]:
    """Parses a row; its published columns get the names of ``columns``, and passages become texts.

    A JSON list is a query, a positive and negatives. Numbered columns such as ``negative_1`` become one list, after
    ``negative``.

    Args:
        columns: of the query, the positive and the negative; others are resolved as
            :func:`mgpu_pipe.data.files.json_row` does.

    Raises:
        DataError: broken JSON, or neither an object nor a list of texts.
    """
    _, positive, negative = columns[:3]
    texts = _read_list(line)
    if texts is not None:
        return dict(zip(columns, (texts[0], texts[1], texts[2:]), strict=False))
    row = _with_usual_names(files.json_row(line, origin, *columns), columns)
    numbered = _names_with_numbers(row, negative)
    if values := [value for value in map(row.pop, numbered) if value not in (None, "")]:
        plain = row.get(negative)
        row[negative] = [*(plain if isinstance(plain, list) else [] if plain in (None, "") else [plain]), *values]
    if SCORES not in row and all(isinstance(row.get(name), list) for name in SCORES_OF_SIDES):
        row[SCORES] = [score for name in SCORES_OF_SIDES for score in row[name]]
    for column in (positive, negative):
        if _is_printed(value := row.get(column)) and _SEPARATED.search(origin):
            raise DataError(
                f"{origin}: column '{column}' holds a list as Python prints it; write the list by json.dumps"
            )
        if isinstance(value, list):
            row[column] = [passage(text) for text in value]
        elif isinstance(value, dict):
            row[column] = passage(value)
    return row


def _with_usual_names(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    for column, usual, others in zip(columns[:3], USUAL, PUBLISHED, strict=True):
        other = next((name for name in others if name in row), None)
        if column == usual and column not in row and other is not None:
            row[column] = row.pop(other)
    return row


def _names_with_numbers(row: dict[str, Any], column: str) -> list[str]:
    start = f"{column}_"
    return [name for name in row if name.startswith(start) and name.removeprefix(start).isdecimal()]


def _is_printed(value: Any) -> bool:
    return isinstance(value, str) and PYTHON_LIST.fullmatch(value.strip()) is not None


def mark_pair(line: str, columns: Sequence[str]) -> str:
    """:data:`AGAIN` or :data:`ANEW` for a row that earlier versions read otherwise, empty for any other."""
    return AGAIN if _is_read_again(line, columns) else ANEW if is_published(line, columns) else ""


def _is_read_again(line: str, columns: Sequence[str]) -> bool:
    """Whether a row has numbered negatives next to others, a positive twice, or a list as Python prints it."""
    try:
        row = _with_usual_names(files.json_row(line, "", *columns), columns)
    except DataError:
        return False
    _, positive, negative = columns[:3]
    if negative in row and any(row[name] not in (None, "") for name in _names_with_numbers(row, negative)):
        return True
    positives = row.get(positive)
    if isinstance(positives, list) and len(without_twins([*map(passage, positives)])) < len(positives):
        return True
    return _is_printed(row.get(positive)) or _is_printed(row.get(negative))


def without_twins(values: Sequence[Any]) -> dict[int, Any]:
    """The first of equal values, by their positions."""
    return {number: value for number, value in enumerate(values) if value not in values[:number]}


def is_published(line: str, columns: Sequence[str]) -> bool:
    """Whether :func:`pair_row` finds other texts in a row than earlier versions, which read ``columns`` alone."""
    try:
        before = files.json_row(line, "", *columns)
    except DataError:
        return _read_list(line) is not None
    row = pair_row(line, "", columns)
    return any((row.get(column) or None) != (before.get(column) or None) for column in columns)


def _read_list(line: str) -> list[Any] | None:
    """Values of a row that is a JSON list of two or more."""
    if line.lstrip()[:1] != "[":
        return None
    try:
        values = json.loads(line, parse_constant=files.refuse_constant)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, list) and len(values) > 1 else None


def passage(value: Any) -> Any:
    """The text of a passage after its title; any other value unchanged."""
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return value
    return f"{value.get('title') or ''} {value['text']}".strip()


def check_pair_columns(row: dict[str, Any], origin: str, columns: Sequence[str], read: str | None) -> None:
    """Refuses ids instead of texts, and rows whose label, not ``read``, may say that the pair is wrong; DataError."""
    if any(column not in row for column in columns):
        if ids := [name for name in IDS if name in row]:
            fix = "give the judgements, such as qrels/train.tsv, next to corpus.jsonl and queries.jsonl"
            raise DataError(f"{origin}: is a row of BEIR ({', '.join(ids)}), which is no pair of texts; {fix}")
        return
    for name in TEACHING:
        value = row.get(name)
        if name not in (*columns, read) and is_doubtful(value):
            fix = "keep right pairs alone, without it, or name a teacher's scores by data.scores_column"
            raise DataError(f"{origin}: column '{name}' holds {value!r} and is not read; {fix}")


def is_doubtful(value: Any) -> bool:
    """Whether a label is a number, false, or a relation of two sentences other than entailment."""
    if isinstance(value, str):
        return value.strip().lower() in WRONG or value.strip().lstrip("+-").replace(".", "", 1).isdecimal()
    return value is not True and isinstance(value, (int, float))
