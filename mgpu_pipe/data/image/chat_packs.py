"""Several conversations with pictures in one row, none cut; each has positions of its own, by which attention tells
them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.image.grids import AXES
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

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """As of its conversations."""
        members, counts = self._of(indices)
        found = np.zeros(len(indices), np.int64)
        np.add.at(found, np.repeat(np.arange(len(indices)), counts), self.alone.costs(members))
        return found

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """As of conversations alone, and ``position_ids``, which restart with each; where those alone have them, along
        axes of their own, these stand behind."""
        members, counts = self._of(indices)
        # A row holds fewer than seq_len conversations: each has a number of its own.
        apart = np.repeat(numbers, counts) * self._seq_len + ranges(np.zeros_like(counts), counts)
        alone = self.alone.batch(members, np.where(np.repeat(numbers, counts) < 0, np.repeat(numbers, counts), apart))
        row_of, lengths = np.repeat(np.arange(len(indices)), counts), self.alone.lengths[members]
        begins = np.cumsum(lengths) - lengths
        begins -= np.repeat(begins[np.cumsum(counts) - counts], counts)
        rows = {
            "input_ids": alone["input_ids"].new_zeros(len(indices), self._seq_len),
            "labels": alone["labels"].new_full((len(indices), self._seq_len), IGNORE_INDEX),
        }
        # What is behind them all is a document of its own.
        positions = torch.arange(self._seq_len).repeat(len(indices), 1)
        axes = torch.arange(self._seq_len).repeat(len(indices), AXES, 1) if "position_ids" in alone else None
        for at, (row, first, length) in enumerate(zip(row_of.tolist(), begins.tolist(), lengths.tolist(), strict=True)):
            here, behind = slice(first, first + length), torch.arange(self._seq_len - first - length)
            for name in ("input_ids", "labels"):
                rows[name][row, here] = alone[name][at, :length]
            positions[row, here], positions[row, first + length :] = torch.arange(length), behind
            if axes is not None:
                axes[row, :, here], axes[row, :, first + length :] = alone["position_ids"][at, :, :length], behind
        rows["position_ids"] = positions if axes is None else torch.cat([positions[:, None], axes], 1)
        for name, amounts in _beside(alone).items():
            rows[name] = _joined(alone[name], amounts, row_of, len(indices))
        if "pictures" in alone:
            rows["pictures"] = torch.zeros(len(indices), dtype=torch.int64)
            rows["pictures"].index_add_(0, torch.from_numpy(row_of), alone["pictures"])
        return rows

    def _of(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The conversations of these rows, one row after the other, and how many each has."""
        first, counts = self._offsets[indices], self._offsets[indices + 1] - self._offsets[indices]
        return self._members[ranges(first, counts)], counts


def _beside(alone: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.int64]]:
    """What a conversation has of pictures, by the name of its field, and how much of each one has."""
    if "grids" in alone:
        patches = alone["grids"].prod(-1)
        return {"grids": (patches > 0).sum(1).numpy(), "pixel_values": patches.sum(1).numpy()}
    pictures = alone["pictures"].numpy()
    return {name: pictures for name in ("pixel_values", "shown") if name in alone}


def _joined(values: torch.Tensor, amounts: NDArray[np.int64], row_of: NDArray[np.int64], rows: int) -> torch.Tensor:
    """What the conversations of each row have, one after the other, filled up with zeros."""
    filled = np.zeros(rows, np.int64)
    joined = values.new_zeros(rows, int(np.bincount(row_of, amounts, rows).max()), *values.shape[2:])
    for at, (row, many) in enumerate(zip(row_of.tolist(), amounts.tolist(), strict=True)):
        joined[row, filled[row] : filled[row] + many] = values[at, :many]
        filled[row] += many
    return joined
