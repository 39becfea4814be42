"""Scores of a reranker for the documents of queries: :func:`score_rows` is the page to read first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from mgpu_pipe.data.text.pair_template import join_pair, pair_template
from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.batch.job_folder import Share, compute_batches
from mgpu_pipe.inference.batch.score_rows import ScoredRow, read_scored_rows
from mgpu_pipe.inference.batch.settings import ScoreSettings
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.objectives.sequence_classification import token_types

ROWS_AT_ONCE = 64
"""Rows whose pairs are sorted by length; the same for every number of processes."""
SCORES = "scores"


def score_rows(settings: ScoreSettings, run: LoadedRun, share: Share) -> None:
    """Score this process's rows; the first process then waits for the others and writes the output."""
    folder, scorer = settings.folder(), PairScorer(run, settings.batch_size)

    def compute(rows: Sequence[ScoredRow]) -> Iterator[tuple[int, bytes]]:
        scores = scorer.score([(row.query, document) for row in rows for document in row.documents])
        taken = iter(scores)
        for row in rows:
            record = {"line": row.line, SCORES: [*islice(taken, len(row.documents))]}
            yield row.line, json.dumps(record).encode() + b"\n"

    batches = _batches_of(read_scored_rows(settings.input))
    seconds = compute_batches(folder, share, batches, settings.rows, compute, "row")
    if share.is_first:
        scored, lines, documents = folder.answers(), dict[int, bytes](), 0
        for row in read_scored_rows(settings.input):
            columns = {**row.columns, SCORES: json.loads(scored[row.line])[SCORES]}
            lines[row.line] = json.dumps(columns, ensure_ascii=False).encode() + b"\n"
            documents += len(row.documents)
        folder.finish(lines)
        speed = f"{seconds:.1f} s, {documents / max(seconds, 1e-9):,.0f} documents/s"
        what = f"{documents:,} documents of {settings.rows:,} queries in {settings.output}"
        print_line(f"{what}; {speed}", file=sys.stderr, flush=True)


def _batches_of(rows: Iterable[ScoredRow]) -> Iterator[list[ScoredRow]]:
    rows = iter(rows)
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield batch


class PairScorer:
    """A reranker's model, which scores pairs of query and document as the run was trained to.

    Args:
        batch_size: pairs in a forward pass.
    """

    def __init__(self, run: LoadedRun, batch_size: int) -> None:
        if run.tokenizer_folder is None:
            raise BadInputError(f"{run.source}: no tokenizer next to it; give the run's folder, which keeps one")
        self._model: Any = run.model
        self._tokenizer: Any = run.tokenizer()
        self._template = pair_template(run.tokenizer_folder)
        self._batch_size = batch_size
        config: Any = run.model.config
        self._config = config
        padding = config.pad_token_id
        self._padding = max(0, int((self._tokenizer.pad_token_id if padding is None else padding) or 0))
        positions = usable_positions(config.max_position_embeddings, padding, config.model_type)
        longest = self._tokenizer.model_max_length if run.config is None else run.config.data.seq_len
        self._room = min(longest, positions)

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The model's output for each pair, before any sigmoid, in float32 digits."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        every = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        tokens = {text: np.asarray(ids, np.int64) for text, ids in zip(texts, every, strict=True)}
        rows = [join_pair(self._template, tokens[query], tokens[document], self._room) for query, document in pairs]
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index][0]), index))
        scores = np.empty(len(rows), np.float32)
        for first in range(0, len(order), self._batch_size):
            some = order[first : first + self._batch_size]
            scores[some] = self._forward([rows[index] for index in some])
        return [float(f"{value:.9g}") for value in scores]

    def _forward(self, rows: Sequence[tuple[np.ndarray[Any, Any], int]]) -> np.ndarray[Any, Any]:
        """Scores of rows of tokens with the place of their first token of type 1, (rows,)."""
        width, device = max(len(ids) for ids, _ in rows), self._model.device
        ids, kinds, mask = (torch.full((len(rows), width), value) for value in (self._padding, 0, 0))
        for row, (tokens, second) in enumerate(rows):
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
            kinds[row, second : len(tokens)] = 1
            mask[row, : len(tokens)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, **token_types(self._config, kinds)}
        outputs = self._model(**{name: value.to(device) for name, value in inputs.items()})
        return np.asarray(outputs.logits[:, 0].float().cpu())
