"""Preference pairs as tensors: one packed row a pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.encode import TRAINED
from mgpu_pipe.data.text.token_store import TokenStore


@dataclass(frozen=True)
class PreferenceSamples:
    """A :class:`mgpu_pipe.data.samples.SampleSet` of one split's pairs."""

    store: TokenStore
    start: NDArray[np.int64]
    """Of each pair in the token file, (pairs,)."""
    chosen: NDArray[np.int64]
    """Tokens of each chosen conversation; the rejected one begins behind it."""
    length: NDArray[np.int64]
    """Tokens of both."""
    seq_len: int
    padding_token_id: int
    reopen: Callable[[], SampleSet]
    """Opens them in another process, which maps the files itself; it is not sent what they hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reopen, ()

    def __len__(self) -> int:
        return len(self.start)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.length[indices].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The pairs ``indices`` as int64 tensors, as :mod:`mgpu_pipe.objectives.dpo` describes them."""
        assert self.store.loss_mask is not None
        place = np.arange(self.seq_len + 1)
        chosen, length = self.chosen[indices][:, None], self.length[indices][:, None]
        at = self.start[indices][:, None] + place
        inside = place < length
        ids = np.where(inside, self.store.tokens.take(at, mode="clip").astype(np.int64), self.padding_token_id)
        trained = inside & (self.store.loss_mask.take(at, mode="clip") & TRAINED != 0) & (place != chosen)
        document_start = np.where(place < chosen, 0, np.where(inside, chosen, length))
        arrays = {
            "input_ids": ids[:, :-1],
            "labels": np.where(trained, ids, IGNORE_INDEX)[:, 1:],
            "position_ids": (place - document_start)[:, :-1],
            "rejected": (inside & (place >= chosen)).astype(np.int64)[:, :-1],
        }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
        return {**tensors, "pair": torch.from_numpy(indices.copy())}
