"""Conversations with labelled answers as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.document_encoder import TRAINED
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.unpaired_answers import answer_starts, is_desirable, unrelated_samples

UNRELATED = "unrelated_"
"""Prefix of the fields with the answer of another sample."""


class UnpairedSamples:
    """Labelled answers of one split, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        documents: of the split, in the store.
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(
        self,
        store: TokenStore,
        documents: NDArray[np.int64],
        seq_len: int,
        padding_token_id: int,
        reopen: Callable[[], SampleSet],
    ) -> None:
        self._store, self._seq_len, self._padding, self._reopen = store, seq_len, padding_token_id, reopen
        self._start, self._end = store.offsets[documents], store.offsets[documents + 1]
        self._answer = answer_starts(store, documents)
        self._desirable = is_desirable(store, documents).astype(np.int64)
        self._unrelated = unrelated_samples(store.hashes[documents])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``reopen``: another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._start)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int((self._end[indices] - self._start[indices]).sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Batch of the samples ``indices`` as int64 tensors, in the form of :mod:`mgpu_pipe.objectives.kto`.

        The fields ``unrelated_...`` hold the prompt with the answer of another sample, cut at ``data.seq_len``.
        """
        other = self._unrelated[indices]
        arrays = {
            **self._rows(indices, indices, ""),
            **self._rows(indices, other, UNRELATED),
            "desirable": self._desirable[indices],
            "sample": indices.copy(),
        }
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}

    def _rows(
        self, prompts: NDArray[np.int64], answers: NDArray[np.int64], prefix: str
    ) -> dict[str, NDArray[np.int64]]:
        """Rows of a prompt and an answer each, padded by a separate document."""
        assert self._store.loss_mask is not None
        place = np.arange(self._seq_len + 1)
        start, prompt = self._start[prompts][:, None], (self._answer - self._start)[prompts][:, None]
        length = np.minimum(prompt + (self._end - self._answer)[answers][:, None], self._seq_len)
        inside = place < length
        positions = np.where(place < prompt, start + place, self._answer[answers][:, None] + place - prompt)
        ids = np.where(inside, self._store.tokens.take(positions, mode="clip").astype(np.int64), self._padding)
        trained = inside & (place >= prompt) & (self._store.loss_mask.take(positions, mode="clip") & TRAINED != 0)
        arrays = {
            "input_ids": ids[:, :-1],
            "labels": np.where(trained, ids, IGNORE_INDEX)[:, 1:],
            "position_ids": (place - np.where(inside, 0, length))[:, :-1],
        }
        return {prefix + name: value for name, value in arrays.items()}
