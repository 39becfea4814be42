"""Labelled texts as tensors: one row a text, or a pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.token_store import TokenStore, load_array

if TYPE_CHECKING:
    from mgpu_pipe.data.text.labelled import PreparedLabelled


class LabelledSamples:
    """One split of labelled texts, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        reopen: gives the same samples in another process; it can be pickled.
    """

    def __init__(self, prepared: PreparedLabelled, split: Split, reopen: Callable[[], LabelledSamples]) -> None:
        self._reopen, self._seq_len, self._padding = reopen, prepared.seq_len, prepared.padding_token_id
        folder, documents = prepared.folder_of(split), prepared.documents(split)
        store = TokenStore.open(folder)
        self._tokens, self._start = store.tokens, store.offsets[documents]
        self._length = store.offsets[documents + 1] - self._start
        self._second = load_array(folder / "seconds.npy")[documents]
        self._labels = prepared.labels(split)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._labels)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self._length[indices].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``token_type_ids``, (rows, seq_len); ``lengths`` and ``labels``, (rows,)."""
        place, lengths = np.arange(self._seq_len), self._length[indices]
        inside = place < lengths[:, None]
        ids = self._tokens.take(self._start[indices][:, None] + place, mode="clip").astype(np.int64)
        arrays = {
            "input_ids": np.where(inside, ids, self._padding),
            "token_type_ids": (inside & (place >= self._second[indices][:, None])).astype(np.int64),
            "lengths": lengths,
            "labels": self._labels[indices],
        }
        return {name: torch.from_numpy(value) for name, value in arrays.items()}
