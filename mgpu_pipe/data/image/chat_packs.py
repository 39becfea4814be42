"""Several conversations with pictures in one row, none cut; each has positions of its own, by which attention tells
them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.packing import best_fit, ranges

if TYPE_CHECKING:
    from mgpu_pipe.data.image.chat_samples import PictureChatSamples


def rows_of_lengths(lengths: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which conversations share a row, by best fit: those between each two offsets."""
    bins = best_fit(lengths, seq_len)
    return np.concatenate([[0], np.cumsum(np.bincount(bins))]).astype(np.int64), np.argsort(bins, kind="stable")


class PackedChats:
    """Rows of one split, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        alone: the conversations.
        together: pack them; else each has a row of its own.
        reopen: gives the same samples in another process; it can be pickled.
    """

    def __init__(
        self, alone: PictureChatSamples, seq_len: int, together: bool, reopen: Callable[[], SampleSet]
    ) -> None:
        self.alone, self._seq_len, self._reopen = alone, seq_len, reopen
        one_each = np.arange(len(alone) + 1), np.arange(len(alone))
        self._offsets, self._members = rows_of_lengths(alone.lengths, seq_len) if together else one_each

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        members = self._of(indices)[0]
        return self.alone.valid_units(members, members)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self._seq_len

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.positions(indices) - int(self.alone.lengths[self._of(indices)[0]].sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """As of conversations alone, and ``position_ids``, which restart with each."""
        members, counts = self._of(indices)
        # A row holds fewer than seq_len conversations: each has a number of its own.
        apart = np.repeat(numbers, counts) * self._seq_len + ranges(np.zeros_like(counts), counts)
        alone = self.alone.batch(members, np.where(np.repeat(numbers, counts) < 0, np.repeat(numbers, counts), apart))
        row_of, lengths = np.repeat(np.arange(len(indices)), counts), self.alone.lengths[members]
        pictures = alone["pictures"].numpy()
        shown = np.bincount(row_of, pictures, len(indices)).astype(np.int64)
        rows = {name: value.new_zeros(len(indices), *value.shape[1:]) for name, value in alone.items()}
        rows["labels"].fill_(IGNORE_INDEX)
        rows["position_ids"] = torch.arange(self._seq_len).repeat(len(indices), 1)
        rows["pictures"] = torch.from_numpy(shown)
        beside = tuple(name for name in alone if name in ("pixel_values", "shown"))
        for name in beside:
            rows[name] = alone[name].new_zeros(len(indices), int(shown.max()), *alone[name].shape[2:])
        filled, seen = np.zeros_like(counts), np.zeros_like(counts)
        for at, (row, length, many) in enumerate(
            zip(row_of.tolist(), lengths.tolist(), pictures.tolist(), strict=True)
        ):
            first, place = int(filled[row]), int(seen[row])
            for name in ("input_ids", "labels"):
                rows[name][row, first : first + length] = alone[name][at, :length]
            rows["position_ids"][row, first:] = torch.arange(self._seq_len - first)
            for name in beside:
                rows[name][row, place : place + many] = alone[name][at, :many]
            filled[row], seen[row] = first + length, place + many
        for row, end in enumerate(filled.tolist()):  # what is behind them all is a document of its own
            rows["position_ids"][row, end:] = torch.arange(self._seq_len - end)
        return rows

    def _of(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The conversations of these rows, one row after the other, and how many each has."""
        first, counts = self._offsets[indices], self._offsets[indices + 1] - self._offsets[indices]
        return self._members[ranges(first, counts)], counts
