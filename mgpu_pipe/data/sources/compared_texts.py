"""Rows of texts: a query, a text to find and texts not to find (``data=embedding_pairs``), or two sentences and their
similarity (``data=scored_pairs``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from mgpu_pipe.config.identity import CONTENT
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.text.beir import GRADES, pair_lines, text_files
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.file_source import FileFormat, Rows, check_first_row, table_rows, text_of
from mgpu_pipe.data.text.pair_columns import USUAL, check_pair_columns, mark_pair, pair_row, without_twins
from mgpu_pipe.errors import DataError


@dataclass
class EmbeddingPairsConfig(DataConfig):
    query_column: str = field(default=USUAL[0], metadata=CONTENT)
    """Name of the text that searches (embedding_pairs)."""
    positive_column: str = field(default=USUAL[1], metadata=CONTENT)
    """Name of the text to find, or of a list of such texts, which make a sample each (embedding_pairs)."""
    negative_column: str = field(default=USUAL[2], metadata=CONTENT)
    """Name of a text that the query is not to find, or of a list of them; rows may have none (embedding_pairs)."""
    scores_column: str | None = field(default=None, metadata=CONTENT)
    """Name of a teacher's scores of a row, a list: the positive's, then each negative's, of any range;
    null: no scores. For objective.loss=margin_mse and kl (embedding_pairs)."""
    random_negatives: int = field(default=0, metadata={**CONTENT, "at_least": 0})
    """Negatives that each sample draws from all documents of its split, after those of its row (objective=reranker).
    Each epoch draws others; each evaluation draws the same."""
    query_prompt: str | None = field(default=None, metadata=CONTENT)
    """Text before every query, such as 'query: '; the exported folder has it too."""
    document_prompt: str | None = field(default=None, metadata=CONTENT)
    """Text before every positive and negative, such as 'passage: '; the exported folder has it too."""

    def text_columns(self) -> tuple[str, str, str]:
        """Names of the columns of texts: query, positive and negative."""
        return self.query_column, self.positive_column, self.negative_column

    def sample_text(self) -> str:
        return f"texts of {self.seq_len} tokens, padded"

    def tokens(self) -> int:
        """Tokens of a query, a positive and its random negatives with padding."""
        return (2 + self.random_negatives) * self.seq_len


@dataclass
class ScoredPairsConfig(DataConfig):
    sentence1_column: str = field(default="sentence1", metadata=CONTENT)
    """Name of the first sentence (scored_pairs)."""
    sentence2_column: str = field(default="sentence2", metadata=CONTENT)
    """Name of the second sentence (scored_pairs)."""
    score_column: str = field(default="score", metadata=CONTENT)
    """Name of the number that says how similar both are, of any range (scored_pairs)."""

    def sample_text(self) -> str:
        return f"sentences of {self.seq_len} tokens, padded"

    def tokens(self) -> int:
        """Tokens of both sentences with padding."""
        return 2 * self.seq_len


def scored_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    """Document of a row, a JSON list of sentences, split by the first; DataError if broken, empty or unscored."""
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
    files.require_columns(row, origin, {"data.score_column": keys.score_column})
    score = finite_number(row[keys.score_column], keys.score_column, origin)
    return Document(json.dumps(texts, ensure_ascii=False), origin, size, score=score, key=texts[0])


def check_scored_row(data: DataConfig, line: str, origin: str) -> None:
    """Checks a row of a file; raises as :func:`scored_document` does."""
    scored_document(data, line, origin, 0)


def finite_number(value: Any, column: str, origin: str) -> float:
    """The number that ``value`` or its text (CSV) is; DataError if it is none, or not finite."""
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{origin}: column '{column}' holds {value!r}, not a number; {files.FIX}")
    return score


SCORE = "score"
"""Column that is refused where ``data.scores_column`` does not name it."""


def pair_rows(data: DataConfig, path: Path, expected: Fingerprint) -> Rows:
    """Reads a file's rows, one for each of several positives; :func:`pair_document` refuses what cannot be parsed."""
    keys = cast(EmbeddingPairsConfig, data)
    for line, origin, size in pair_lines(path, expected):
        for number, positive in enumerate(_each_positive(line, origin, keys)):
            yield positive, origin, 0 if number else size


def _each_positive(line: str, origin: str, keys: EmbeddingPairsConfig) -> Iterator[str]:
    """A row for each distinct positive, with its score and those of the negatives."""
    column, scored = keys.positive_column, keys.scores_column
    try:
        row = pair_row(line, origin, (*keys.text_columns(), *([] if scored is None else [scored])))
    except DataError:
        row = {}
    positives = row.get(column)
    if not isinstance(positives, list) or len(positives) < 2:
        yield line
        return
    scores = None if scored is None else row.get(scored)
    chosen = dict(enumerate(positives)) if GRADES in row else without_twins(positives)
    for number, positive in chosen.items():
        if scored is not None and isinstance(scores, list):
            row = {**row, scored: [*scores[number : number + 1], *scores[len(positives) :]]}
        yield json.dumps({**row, column: [positive]}, ensure_ascii=False)


def check_pair_row(data: DataConfig, line: str, origin: str) -> None:
    """Checks a row of a file; raises as :func:`pair_document` does."""
    for positive in _each_positive(line, origin, cast(EmbeddingPairsConfig, data)):
        pair_document(data, positive, origin, 0)


def pair_document(data: DataConfig, line: str, origin: str, size: int) -> Document:
    """Makes the document of a row.

    Raises:
        DataError: the row is broken, lacks a text, has an empty or equal one, or a score that nothing reads; or the
            teacher's scores are not those of its texts.
    """
    keys = cast(EmbeddingPairsConfig, data)
    row = pair_row(line, origin, keys.text_columns())
    check_pair_columns(row, origin, keys.text_columns()[:2], keys.scores_column)
    if keys.scores_column is None and row.get(SCORE) is not None:
        fix = "remove it, name a teacher's scores by data.scores_column, or use data=scored_pairs"
        raise DataError(f"{origin}: column '{SCORE}' is not read, a pair is right or wrong; {fix}")
    files.require_columns(
        row, origin, {"data.query_column": keys.query_column, "data.positive_column": keys.positive_column}
    )
    query, *others = texts_of(row[keys.query_column], keys.query_column, origin)
    positive, *more = texts_of(row[keys.positive_column], keys.positive_column, origin)
    if others or more:
        column = keys.query_column if others else keys.positive_column
        raise DataError(f"{origin}: column '{column}' is a list of lists or of queries; {files.FIX}")
    negatives = texts_of(row.get(keys.negative_column), keys.negative_column, origin, least=0)
    if positive in negatives:
        raise DataError(f"{origin}: a text of column '{keys.negative_column}' is the positive; {files.FIX}")
    document = document_of(keys, query, positive, negatives, origin, size)
    return document._replace(scores=_scores(row, keys.scores_column, len(negatives), origin))


def _scores(row: dict[str, Any], column: str | None, negatives: int, origin: str) -> tuple[float, ...]:
    """The teacher's scores of the positive and the negatives of a row; empty without a column."""
    if column is None:
        return ()
    files.require_columns(row, origin, {"data.scores_column": column})
    values = row[column]
    if not isinstance(values, list) or len(values) != 1 + negatives:
        has = f"{len(values)} scores" if isinstance(values, list) else repr(values)
        raise DataError(
            f"{origin}: column '{column}' holds {has} for 1 positive and {negatives} negatives; {files.FIX}"
        )
    if not negatives:
        raise DataError(f"{origin}: a positive without negatives has no score to be compared with; {files.FIX}")
    return tuple(finite_number(value, column, origin) for value in values)


def document_of(
    keys: EmbeddingPairsConfig, query: str, positive: str, negatives: Sequence[str], origin: str, size: int
) -> Document:
    """The document of a pair: its texts with their prompts, a JSON list. The query decides the held-out split."""
    before = keys.document_prompt or ""
    texts = [(keys.query_prompt or "") + query, *(before + text for text in (positive, *negatives))]
    return Document(json.dumps(texts, ensure_ascii=False), origin, size, key=query)


def texts_of(value: Any, column: str, origin: str, least: int = 1) -> list[str]:
    """The text of a column, or those of its list; DataError for an empty one, or fewer than ``least``."""
    values = value if isinstance(value, list) else [] if value is None or (value == "" and not least) else [value]
    for text in values:
        if not isinstance(text, str):
            raise DataError(f"{origin}: column '{column}' holds {type(text).__name__}, not a string; {files.FIX}")
        if not text.strip():
            raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
        files.check_unicode(text, origin)
    if len(values) < least:
        raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
    return values


def check_pair_file(data: DataConfig, path: Path, whole: bool) -> None:
    """Checks the first row of a file; of BEIR's judgements, that their texts are there."""
    if not text_files(path):
        check_first_row(data, path, whole, check_pair_row, nested=True)


def _pair_columns(data: DataConfig) -> object:
    keys = cast(EmbeddingPairsConfig, data)
    scores = [] if keys.scores_column is None else [keys.scores_column]
    return (*keys.text_columns(), keys.query_prompt, keys.document_prompt, *scores)


def _scored_columns(data: DataConfig) -> object:
    keys = cast(ScoredPairsConfig, data)
    return (keys.sentence1_column, keys.sentence2_column, keys.score_column)


PAIRS = FileFormat(
    name="embedding_pairs",
    rows=pair_rows,
    document=pair_document,
    check_file=check_pair_file,
    columns=_pair_columns,
    kind="text_groups",
    others=text_files,
    reads_anew=lambda data, line: mark_pair(line, cast(EmbeddingPairsConfig, data).text_columns()),
    is_table=True,
)
SCORED = FileFormat(
    name="scored_pairs",
    rows=table_rows,
    document=scored_document,
    check_file=partial(check_first_row, check_row=check_scored_row),
    columns=_scored_columns,
    kind="text_groups",
    is_table=True,
)
SOURCES = (
    PAIRS.source(samples="embedding_pairs", keys=EmbeddingPairsConfig),
    SCORED.source(samples="scored_pairs", keys=ScoredPairsConfig),
)
