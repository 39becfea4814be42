"""Pairs of source and target text; each pair is a sample.

In the token file a pair is a document: source and target, each with the end-of-sequence token at its end; the loss mask
marks the target's tokens. So pairs share tokenising, caching and the held-out split with all text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.bad_samples import LengthLimit
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.prepared_rows import PreparedRows, RowSamples, prepare_rows
from mgpu_pipe.data.text.token_store import TokenStore


class PairSamples(RowSamples):
    """Pairs of one split, padded to the same lengths.

    A longer text is cut; the end-of-sequence token replaces its last token.
    """

    def __init__(self, prepared: PreparedPairs, split: Split, reopen: Any) -> None:
        super().__init__(prepared, split, reopen)
        self._room = prepared.seq_len, prepared.target_len
        self._source, self._target = (tokens[self.documents] for tokens in pair_tokens(self.store))

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Tokens of the targets, the end-of-sequence tokens included."""
        return int(np.minimum(self._target[indices], self._room[1]).sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * sum(self._room)

    def padding(self, indices: NDArray[np.int64]) -> int:
        sources = np.minimum(self._source[indices], self._room[0])
        return self.positions(indices) - int(sources.sum()) - self.valid_units(indices, indices)

    def arrays(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """int64 arrays in the form of :mod:`mgpu_pipe.objectives.seq2seq`."""
        start, (source_room, target_room) = self.start[indices], self._room
        sources, targets = self._source[indices], self._target[indices]
        return {
            "input_ids": self._pad(start, sources, source_room, self.padding_token_id),
            "attention_mask": (np.arange(source_room) < sources[:, None]).astype(np.int64),
            "labels": self._pad(start + sources, targets, target_room, IGNORE_INDEX),
        }

    def _pad(self, start: NDArray[np.int64], length: NDArray[np.int64], room: int, padding: int) -> NDArray[np.int64]:
        """Pads runs of tokens to rows of ``room`` tokens."""
        place = np.arange(room)
        rows = self.tokens_at(start[:, None] + place)
        rows[place >= length[:, None]] = padding
        rows[length > room, -1] = self.padding_token_id
        return rows


@dataclass(frozen=True, kw_only=True)
class PreparedPairs(PreparedRows):
    """Everything a worker needs to load pairs; :func:`prepare_pairs` makes it. Its rows are padded sources."""

    kind: ClassVar[str] = "pairs"
    what: ClassVar[str] = "pairs"
    samples_class = PairSamples

    target_len: int
    """Tokens of a padded target."""
    num_pairs: int = 0
    """Pairs of both splits."""
    num_tokens: int = 0
    """Tokens of both splits, end-of-sequence tokens included."""

    def limits(self, folder: Path) -> list[tuple[LengthLimit, NDArray[np.int64]]]:
        sources, targets = pair_tokens(TokenStore.open(folder))
        limits = LengthLimit("data.seq_len", self.seq_len, "sources"), sources
        return [limits, (LengthLimit("data.target_len", self.target_len, "targets"), targets)]

    def limit(self) -> str:
        return f"data.seq_len={self.seq_len} or data.target_len={self.target_len}"

    @property
    def digest_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("pairs",), ("pairs",)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pairs, "pairs"), (self.num_tokens, "tokens"), *self.left_out()]


def pair_tokens(store: TokenStore) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each pair's source and of its target, ends included, (pairs,) each."""
    assert store.loss_mask is not None
    targets = np.add.reduceat(store.loss_mask, store.offsets[:-1], dtype=np.int64)
    return store.lengths - targets, targets


def prepare_pairs(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedPairs:
    """Prepares the pairs of ``data``, or finds them cached; errors: see
    :func:`~mgpu_pipe.data.text.prepare_text.prepare`."""
    known = prepare_rows(PreparedPairs, model, data, objective, progress, target_len=data.target_tokens())
    pairs, tokens = known.count()
    rule = [known.on_too_long] if known.count_long() else []
    known = replace(known, num_pairs=pairs, num_tokens=tokens)
    return known.with_samples(data, (known.seq_len, known.target_len, *rule))
