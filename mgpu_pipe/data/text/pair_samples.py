"""Pairs of source and target as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.token_store import TokenStore

if TYPE_CHECKING:
    from mgpu_pipe.data.text.pairs import Pairs


@dataclass(frozen=True)
class PairSamples:
    """A :class:`mgpu_pipe.data.samples.SampleSet` of one split's pairs, each padded to the same lengths."""

    store: TokenStore
    pairs: Pairs
    lengths: tuple[int, int]
    """Of padded sources and targets."""
    padding_token_id: int
    """Of sources."""
    reopen: Callable[[], SampleSet]
    """Opens them in another process, which maps the files itself; it is not sent what they hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reopen, ()

    def __len__(self) -> int:
        return len(self.pairs)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Tokens of the targets, the end-of-sequence tokens included."""
        return int(self.pairs.target_tokens[indices].sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * sum(self.lengths)

    def padding(self, indices: NDArray[np.int64]) -> int:
        filled = self.pairs.source_tokens[indices].sum() + self.pairs.target_tokens[indices].sum()
        return self.positions(indices) - int(filled)

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The pairs ``indices`` as int64 tensors, as :mod:`mgpu_pipe.objectives.seq2seq` describes them."""
        start, (source_room, target_room) = self.pairs.start[indices], self.lengths
        sources, targets = self.pairs.source_tokens[indices], self.pairs.target_tokens[indices]
        ids = self._padded(start, sources, source_room, self.padding_token_id)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((np.arange(source_room) < sources[:, None]).astype(np.int64)),
            "labels": torch.from_numpy(self._padded(start + sources, targets, target_room, IGNORE_INDEX)),
        }

    def _padded(
        self, start: NDArray[np.int64], length: NDArray[np.int64], room: int, padding: int
    ) -> NDArray[np.int64]:
        """Runs of tokens as rows of ``room`` tokens."""
        place = np.arange(room)
        # Behind the end of a run lies what is overwritten, and behind the file's end nothing: clipped.
        rows = self.store.tokens.take(start[:, None] + place, mode="clip").astype(np.int64)
        rows[place >= length[:, None]] = padding
        return rows
