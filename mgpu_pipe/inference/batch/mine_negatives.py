"""Hard negatives: the texts that a model takes for what a query is to find, and that are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from mgpu_pipe.config.objective import description
from mgpu_pipe.data.data_source import held_out_data
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig, check_pair_row
from mgpu_pipe.data.text.beir import pair_lines
from mgpu_pipe.data.text.pair_columns import pair_row
from mgpu_pipe.data.text.prepared_rows import stored_documents
from mgpu_pipe.data.text.scored_groups import PreparedEmbeddingPairs
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.batch.encode import TextEncoder, batches_of
from mgpu_pipe.inference.batch.texts import TextRow, prompt_of, vectors_of, width_of
from mgpu_pipe.inference.find_model import ModelSource
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.system.local_files import replace_file

SCORES_AT_ONCE = 1 << 22
"""Scores that exist at a time: of some queries with some documents."""
KEYS = EmbeddingPairsConfig()
"""Names of the columns."""


@dataclass(frozen=True)
class MiningRules:
    """Which documents are hard negatives of a query.

    Attributes:
        negatives: number of them, at most.
        margin: by how much their scores are below that of the query's lowest positive, at least; None for any score.
        skip_top: number of the nearest ones to leave out.
    """

    negatives: int
    margin: float | None
    skip_top: int


@dataclass(frozen=True)
class MinedRows:
    """Numbers of what was mined.

    Attributes:
        rows: of the input.
        negatives: new ones, of all rows.
        short: rows with fewer of them than were wanted.
    """

    rows: int
    negatives: int
    short: int


def mine_file(
    run: LoadedRun, source: ModelSource, pairs: Path | None, out: Path, rules: MiningRules, batch: int
) -> MinedRows:
    """Writes the rows of ``pairs`` as JSON Lines, with hard negatives after their own negatives.

    Candidates are all positives and negatives of the file. All positives of rows with the same query are its positives.

    Args:
        pairs: file of the rows; None takes the run's training pairs.
        batch: texts in a forward pass.

    Raises:
        BadInputError: a row is broken, or no row gets a negative.
    """
    rows = list(rows_of_run(run, "train") if pairs is None else read_pairs(pairs))
    queries, documents, positives, others = number_texts(rows)
    encoded = encode_sides(run, source, pairs or run.source, queries, documents, batch)
    mined = mine_negatives(*encoded, positives, others, rules)
    names, lines, counts = list(documents), [], []
    numbers = {text: number for number, text in enumerate(queries)}
    for row in rows:
        new = [names[number] for number in mined[numbers[_texts(row[KEYS.query_column])[0]]]]
        negatives = [*_texts(row.get(KEYS.negative_column)), *new]
        lines.append(json.dumps({**row, KEYS.negative_column: negatives}, ensure_ascii=False))
        counts.append(len(new))
    if not any(counts):
        fix = "lower --margin or --skip-top, or give more rows"
        raise BadInputError(f"{pairs or run.source}: no document is a negative of any query by these rules; {fix}")
    replace_file(out, "\n".join(lines) + "\n", flush=True)
    return MinedRows(len(rows), sum(counts), sum(number < rules.negatives for number in counts))


def read_pairs(path: Path) -> Iterator[dict[str, object]]:
    """Yields the rows of a file like ``data=embedding_pairs``; DataError for a broken row."""
    for line, origin, _ in pair_lines(path):
        check_pair_row(KEYS, line, origin)
        yield pair_row(line, origin, KEYS.text_columns())


def rows_of_run(run: LoadedRun, split: Split) -> Iterator[dict[str, object]]:
    """Yields the pairs that a run trained on, or those that it held out, without their prompts.

    Raises:
        BadInputError: a folder without a run, a run of somebody else, or one without pairs.
    """
    config = run.config
    if config is None or not run.is_trusted or description(config.objective.name).samples != "embedding_pairs":
        reason = "names no pairs that this user trained on"
        raise BadInputError(f"{run.source}: {reason}; give a file of pairs by --input")
    data, key = config.data, "data.paths"
    prepared = cast(PreparedEmbeddingPairs, prepare(config))
    numbers = prepared.documents(split)
    if split == "validation":
        numbers = numbers[prepared.evaluated_samples()]
        if data.validation_paths:
            data, key = held_out_data(data), "data.validation_paths"
    chosen = set(numbers.tolist())
    before = (getattr(data, "query_prompt", None) or "", getattr(data, "document_prompt", None) or "")
    for number, document in enumerate(stored_documents(data, prepared.folder_of(split), key)):
        if number in chosen:
            query, positive, *negatives = json.loads(document.text)
            texts = [text.removeprefix(before[1]) for text in (positive, *negatives)]
            values = (query.removeprefix(before[0]), texts[0], texts[1:])
            yield dict(zip(KEYS.text_columns(), values, strict=True))


def mine_negatives(
    queries: torch.Tensor,
    documents: torch.Tensor,
    positives: Sequence[set[int]],
    others: Sequence[set[int]],
    rules: MiningRules,
) -> list[list[int]]:
    """Numbers of each query's hard negatives, nearest first; scores are dot products.

    Args:
        queries, documents: vectors, (queries, size) and (documents, size).
        positives: numbers of each query's positives, at least one.
        others: numbers of further documents that are not to be mined for a query.
    """
    most = min(rules.skip_top + rules.negatives, len(documents))
    rows_at_once = max(1, min(len(queries), SCORES_AT_ONCE // (2 * most)))
    mined: list[list[int]] = []
    for begin in range(0, len(queries), rows_at_once):
        some = queries[begin : begin + rows_at_once]
        hidden = [positives[begin + row] | others[begin + row] for row in range(len(some))]
        limits = [
            float((documents[sorted(positives[begin + row])] @ query).min()) - (rules.margin or 0.0)
            for row, query in enumerate(some)
        ]
        limit = some.new_tensor(limits)[:, None] if rules.margin is not None else None
        for scores, numbers in zip(*nearest(some, documents, hidden, limit, most), strict=True):
            best = [number for score, number in zip(scores, numbers, strict=True) if score > -torch.inf]
            mined.append(best[rules.skip_top :])
    return mined


def nearest(
    queries: torch.Tensor, documents: torch.Tensor, hidden: Sequence[set[int]], limit: torch.Tensor | None, most: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Scores and numbers of the ``most`` documents nearest to each query that are not hidden, nearest first; minus
    infinity for those that are, or whose score is above the limit, (queries, 1)."""
    pairs = [(row, number) for row, numbers in enumerate(hidden) for number in numbers]
    rows, columns = torch.tensor(pairs, dtype=torch.int64, device=queries.device).reshape(-1, 2).T
    best_scores = queries.new_zeros(len(queries), 0)
    best = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    at_once = max(most, SCORES_AT_ONCE // len(queries))
    for offset in range(0, len(documents), at_once):
        part = documents[offset : offset + at_once]
        scores = queries @ part.T
        here = (columns >= offset) & (columns < offset + len(part))
        scores[rows[here], columns[here] - offset] = -torch.inf
        if limit is not None:
            scores.masked_fill_(scores > limit, -torch.inf)
        best_scores, indices = torch.cat([best_scores, scores], 1).topk(min(most, best.shape[1] + len(part)))
        places = torch.arange(offset, offset + len(part), device=best.device).expand(len(queries), -1)
        best = torch.cat([best, places], 1).gather(1, indices)
    return best_scores.tolist(), best.tolist()


def number_texts(
    rows: Sequence[Mapping[str, object]],
) -> tuple[dict[str, int], dict[str, int], list[set[int]], list[set[int]]]:
    """Distinct queries and documents with the number of their first row, and numbers of the documents that are each
    query's positives, and its negatives."""
    queries, documents = dict[str, int](), dict[str, int]()
    numbers, places = dict[str, int](), dict[str, int]()
    positives, negatives = list[set[int]](), list[set[int]]()
    for line, row in enumerate(rows, start=1):
        (query,) = _texts(row[KEYS.query_column])
        if query not in queries:
            queries[query], places[query] = line, len(queries)
            positives.append(set())
            negatives.append(set())
        for column, sets in ((KEYS.positive_column, positives), (KEYS.negative_column, negatives)):
            for text in _texts(row.get(column)):
                documents.setdefault(text, line)
                sets[places[query]].add(numbers.setdefault(text, len(numbers)))
    return queries, documents, positives, negatives


def _texts(value: object) -> list[str]:
    """The texts of a column that :func:`read_pairs` checked."""
    values = value if isinstance(value, list) else [] if value in (None, "") else [value]
    return [str(text) for text in values]


def encode_sides(
    run: LoadedRun,
    source: ModelSource,
    file: Path,
    queries: Mapping[str, int],
    documents: Mapping[str, int],
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of queries and of documents with their prompts, (texts, size).

    Their dot products are the model's similarity; vectors have length 1 where it compares by cosine.

    Args:
        file: of the texts, for errors.
        queries, documents: with the numbers of their rows, for errors.
        batch: texts in a forward pass.
    """
    vectors, width = vectors_of(run.config, run.source), width_of(source)
    normalizes = vectors.similarity == "cosine" and not vectors.normalize

    def encode(kind: str, texts: Mapping[str, int]) -> torch.Tensor:
        prompt = prompt_of(vectors, kind) if kind in vectors.prompts else ""
        encoded = _encode(TextEncoder(run, file, prompt, width), texts, batch)
        return torch.nn.functional.normalize(encoded, dim=-1) if normalizes else encoded

    return encode("query", queries), encode("document", documents)


def _encode(encoder: TextEncoder, texts: Mapping[str, int], batch: int) -> torch.Tensor:
    """Vectors of the texts in their order, (texts, size)."""
    numbers, vectors = {text: number for number, text in enumerate(texts)}, None
    for some in batches_of((TextRow(line, text) for text, line in texts.items()), batch):
        part = encoder.encode(some)
        if vectors is None:
            vectors = part.new_empty(len(texts), part.shape[1])
        vectors[[numbers[row.text] for row in some]] = part
    assert vectors is not None  # files without rows are refused
    return vectors
