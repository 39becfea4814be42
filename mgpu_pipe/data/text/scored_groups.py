"""Pairs for embeddings, with a teacher's scores where rows have them, and pairs of sentences with scores."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.pair_columns import USUAL
from mgpu_pipe.data.text.prepared_rows import open_values, prepare_values
from mgpu_pipe.data.text.text_groups import DrawnGroups, PreparedTextGroups, TextGroups, Texts, prepare_groups
from mgpu_pipe.errors import ConfigError, DataError

TEACHER_SCORES, SCORES = "teacher_scores", "scores"


class TaughtGroups(TextGroups):
    """Queries with documents that a teacher scored."""

    def __init__(self, prepared: PreparedTextGroups, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self._scores = open_values(self.folder, TEACHER_SCORES)

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Adds ``scores``, float32 (rows, texts - 1), 0 for a text that a sample does not have."""
        there, places = self.places(indices, numbers)
        scores = np.where(there, self._scores[places], 0.0)[:, 1:].astype(np.float32)
        return {**super().arrays(indices, numbers), "scores": scores}


class ScoredGroups(TextGroups):
    """Pairs of sentences with a score for each sample."""

    def __init__(self, prepared: PreparedScoredPairs, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self._scores = prepared.scores(split)

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """``input_ids`` and ``lengths`` of the texts, and ``scores``, float32 (rows,)."""
        arrays = super().arrays(indices, numbers)
        del arrays["text_numbers"]
        return {**arrays, "scores": self._scores[indices].astype(np.float32)}


@dataclass(frozen=True, kw_only=True)
class PreparedEmbeddingPairs(PreparedTextGroups):
    """Everything a worker needs to load pairs for embeddings; :func:`prepare_embedding_pairs` makes it."""

    kind: ClassVar[str] = "embedding_pairs"
    has_scores: bool = False
    """Whether rows have a teacher's scores."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> SampleSet:
        if self.random_negatives:
            return DrawnGroups(self, split, reopen, seed)
        return (TaughtGroups if self.has_scores else TextGroups)(self, split, reopen)


@dataclass(frozen=True, kw_only=True)
class PreparedScoredPairs(PreparedTextGroups):
    """Everything a worker needs to load pairs with scores; :func:`prepare_scored_pairs` makes it."""

    kind: ClassVar[str] = "scored_pairs"
    samples_class = ScoredGroups

    def scores(self, split: Split) -> NDArray[np.float64]:
        """Score of each sample of a split, in the order of :meth:`documents`."""
        return open_values(self.folder_of(split), SCORES)[self.documents(split)]


def prepare_embedding_pairs(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedEmbeddingPairs:
    """Prepares the pairs (:func:`mgpu_pipe.data.text.prepare_text.prepare`); or DataError if none can be compared."""
    known = prepare_groups(PreparedEmbeddingPairs, model, data, objective, progress)
    _require_room(known, data)
    negative = getattr(data, "negative_column", USUAL[2])
    if known.texts - known.random_negatives == 2 and negative != USUAL[2]:
        fix = "set it to the column of the negatives, or leave it out"
        raise ConfigError("data.negative_column", negative, fix, "no row has a text in a column of this name")
    if getattr(data, "scores_column", None) is not None:
        prepare_values(data, known, TEACHER_SCORES, _teacher_scores, progress)
        known = replace(known, has_scores=True)
    if known.random_negatives:
        _require_documents(known, data)
    elif known.more_tokens is not None:
        _require_negatives(known, data, objective)
    elif known.texts == 2 and 1 in (data.global_batch_size, known.train_samples):
        reason = "a pair has no text to tell from its positive, so its loss is always 0"
        if known.train_samples == 1:
            more = "give more, or negatives"
            raise DataError(f"data.source={data.source}: there is 1 pair to train on: {reason}; {more}")
        raise ConfigError("data.global_batch_size", 1, "use at least 2, or pairs with negatives", reason)
    return known


def prepare_scored_pairs(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedScoredPairs:
    """Prepares the pairs of ``data``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or the scores of a split are all equal, or no cosines for
            ``objective.loss=cosine``.
    """
    known = prepare_groups(PreparedScoredPairs, model, data, objective, progress)
    loss = getattr(objective, "loss", None)
    if loss == "cosent" and data.global_batch_size == 1:
        reason = "the loss compares the pairs of a step"
        raise ConfigError("data.global_batch_size", 1, "use at least 2, or objective.loss=cosine", reason)
    prepare_values(data, known, SCORES, _scores_of, progress)
    splits = {"to train on": known.scores("train")}
    if known.held_out_samples:
        splits["held out"] = known.scores("validation")[known.evaluated_samples()]
    for which, scores in splits.items():
        problem = ""
        if len(np.unique(scores)) < 2:
            problem = f"every score {which} is {scores[0]:g}; give pairs that are more and less similar"
        elif loss == "cosine" and np.abs(scores).max() > 1:
            wrong = scores[np.abs(scores).argmax()]
            problem = f"a score {which} is {wrong:g}, no cosine; divide the scores, or use objective.loss=cosent"
        if problem:
            raise DataError(f"data.source={data.source}: {problem}")
    return known


def _teacher_scores(documents: Iterable[Document]) -> list[float]:
    """A number for each text of all documents: 0 for a query, the teacher's score for the others."""
    scores: list[float] = []
    for document in documents:
        if not document.scores:
            raise DataError(f"{document.origin}: has no teacher's scores; leave out data.scores_column")
        scores += (0.0, *document.scores)
    return scores


def _scores_of(documents: Iterable[Document]) -> list[float]:
    return [document.score for document in documents if document.score is not None]


def _require_room(known: PreparedEmbeddingPairs, data: DataConfig) -> None:
    """Refuses a prompt that leaves no token of a row to the text."""
    from tokenizers import Tokenizer

    prompts: dict[str, str] = {key: getattr(data, key, None) or "" for key in ("query_prompt", "document_prompt")}
    if not any(prompts.values()):
        return
    tokenizer = Tokenizer.from_file(str(known.tokenizer_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for key, prompt in prompts.items():
        length = len(tokenizer.encode(prompt).ids)
        if length >= data.seq_len:
            reason = f"its {length} tokens leave no room for a text in data.seq_len={data.seq_len}"
            raise ConfigError(f"data.{key}", textwrap.shorten(prompt, 40), "shorten it, or raise data.seq_len", reason)


def _require_documents(known: PreparedEmbeddingPairs, data: DataConfig) -> None:
    splits: dict[Split, str] = {"train": "to train on", "validation": "held out"}
    for split, which in splits.items():
        if len(known.documents(split)):
            others = DrawnGroups(known, split, None, 0).fewest_others()
            if others < known.random_negatives:
                reason, fix = f"a query {which} has {max(others, 0)} other documents", "use fewer, or give more pairs"
                raise ConfigError("data.random_negatives", known.random_negatives, fix, reason)


def _require_negatives(known: PreparedEmbeddingPairs, data: DataConfig, objective: ObjectiveConfig) -> None:
    splits: dict[Split, str] = {"train": "to train on", "validation": "held out"}
    for split, which in splits.items():
        pairs = known.documents(split)
        if split == "validation":
            pairs = pairs[known.evaluated_samples()]
        if len(pairs) and np.diff(Texts.open(known.folder_of(split)).first)[pairs].max() == 2:
            reason = f"no row {which} has a negative, which objective={objective.name} ranks below the positive"
            fix = "give column 'negative', add it by mgpu-pipe mine, or draw data.random_negatives=7"
            raise DataError(f"data.source={data.source}: {reason}; {fix}")
