"""Prepares pairs of sentences with scores, as pairs for embeddings are, and their scores beside the token store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.documents import Document
from mgpu_pipe.data.text.prepare_embedding_pairs import PreparedTextGroups, open_texts, prepare_groups
from mgpu_pipe.data.text.row_values import open_values, prepare_values
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.errors import ConfigError, DataError

SCORES = "scores"


@dataclass(frozen=True, kw_only=True)
class PreparedScoredPairs(PreparedTextGroups):
    """Everything a worker needs to load pairs with scores; :func:`prepare_scored_pairs` makes it."""

    kind: ClassVar[str] = "scored_pairs"

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.text.row_tensors import ScoredGroups

        folder, documents = self.folder_of(split), self.documents(split)
        return ScoredGroups(TokenStore.open(folder), open_texts(folder), self, documents, reopen, self.scores(split))

    def scores(self, split: Split) -> NDArray[np.float64]:
        """Score of each sample of a split, in the order of :meth:`documents`."""
        return open_values(self.folder_of(split), SCORES)[self.documents(split)]


def prepare_scored_pairs(config: RunConfig, progress: Progress | None = None) -> PreparedScoredPairs:
    """Prepares the pairs of ``config``, or finds them cached; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        ConfigError, DataError: see there; or the scores of a split are all equal, or no cosines for
            ``objective.loss=cosine``.
    """
    known, rows = prepare_groups(PreparedScoredPairs, config, progress)
    if getattr(config.objective, "loss", None) == "cosent" and config.data.global_batch_size == 1:
        reason = "the loss compares the pairs of a step"
        raise ConfigError("data.global_batch_size", 1, "use at least 2, or objective.loss=cosine", reason)
    prepare_values(config, rows, SCORES, _scores_of, progress)
    name = f"data.source={config.data.source}"
    splits = {"to train on": known.scores("train")}
    if known.held_out_samples:
        splits["held out"] = known.scores("validation")[known.evaluated_samples()]
    for which, scores in splits.items():
        if len(np.unique(scores)) < 2:
            raise DataError(f"{name}: every score {which} is {scores[0]:g}; give pairs that are more and less similar")
        if getattr(config.objective, "loss", None) == "cosine" and np.abs(scores).max() > 1:
            wrong = scores[np.abs(scores).argmax()]
            raise DataError(
                f"{name}: a score {which} is {wrong:g}, no cosine; divide the scores, or use objective.loss=cosent"
            )
    return known


def _scores_of(documents: Iterable[Document]) -> list[float]:
    scores = [document.score for document in documents]
    return [score for score in scores if score is not None]
