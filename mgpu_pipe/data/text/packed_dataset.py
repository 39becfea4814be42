"""Packed samples as tensors, gathered from the memory-mapped token file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.packing import Packs, open_packs, ranges
from mgpu_pipe.data.text.token_store import TokenStore

if TYPE_CHECKING:
    from mgpu_pipe.data.text.prepare_text import PreparedData

# Rows per block; intermediate arrays of a block stay in the processor's cache.
_BLOCK_TOKENS = 1 << 14


@dataclass(frozen=True)
class PackedDataset:
    """Samples of one split, each of ``seq_len`` tokens."""

    store: TokenStore
    packs: Packs
    valid_tokens: NDArray[np.int64]
    """Labels that count, for each sample; shape ``(samples,)``."""
    seq_len: int
    padding_token_id: int
    origin: tuple[PreparedData, Split] | None = None
    """Prepared data and split, to open it again."""

    @classmethod
    def open(cls, prepared: PreparedData, split: Split) -> PackedDataset:
        """Maps a split's files into memory in constant time; ValueError for a held-out split of nothing."""
        files = prepared.train if split == "train" else prepared.validation
        if files is None:
            raise ValueError("this data holds nothing out")
        packs, valid_tokens = open_packs(files.packs)
        tokens = TokenStore.open(files.tokens)
        return cls(tokens, packs, valid_tokens, prepared.seq_len, prepared.eos_token_id, (prepared, split))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles without content: another process maps the files itself."""
        return super().__reduce__() if self.origin is None else (PackedDataset.open, self.origin)

    def __len__(self) -> int:
        return self.packs.num_samples

    def padding(self, indices: NDArray[np.int64]) -> int:
        """Positions of the samples ``indices`` without a document."""
        first = self.packs.offsets[indices]
        chosen = ranges(first, self.packs.offsets[indices + 1] - first)
        return len(indices) * self.seq_len - int(self.packs.pieces.length[chosen].sum())

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Number of the samples' labels that count."""
        return int(self.valid_tokens[indices].sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return len(indices) * self.seq_len

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Attention cost: squared lengths of each sample's documents, and of its padding."""
        first, end = self.packs.offsets[indices], self.packs.offsets[indices + 1]
        length = self.packs.pieces.length[ranges(first, end - first)].astype(np.int64)
        row = np.repeat(np.arange(len(indices)), end - first)
        squares, filled = np.zeros(len(indices), np.int64), np.zeros(len(indices), np.int64)
        np.add.at(squares, row, length**2)
        np.add.at(filled, row, length)
        return squares + (self.seq_len - filled) ** 2

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64] | None = None) -> dict[str, torch.Tensor]:
        """Gathers the samples ``indices`` as int64 tensors ``input_ids``, ``labels``, ``position_ids`` of shape
        ``(len(indices), seq_len)``, as :class:`mgpu_pipe.data.step_batch.StepBatch` defines them.

        If a document continues in another sample, the last label of its piece is the document's next token: a cut costs
        context, not labels.
        """
        shape = (len(indices), self.seq_len)
        input_ids, labels, position_ids = (np.empty(shape, np.int64) for _ in range(3))
        step = max(1, _BLOCK_TOKENS // self.seq_len)
        for begin in range(0, len(indices), step):
            rows = slice(begin, begin + step)
            self._fill(
                indices[rows], input_ids[rows].reshape(-1), labels[rows].reshape(-1), position_ids[rows].reshape(-1)
            )
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(position_ids),
        }

    def _fill(
        self,
        indices: NDArray[np.int64],
        input_ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        position_ids: NDArray[np.int64],
    ) -> None:
        """Writes the samples ``indices`` consecutively into arrays of ``len(indices) * seq_len`` elements."""
        rows = len(indices)
        # Every sample ends with a run of padding (often empty), so that runs tile the block.
        first = self.packs.offsets[indices]
        count = self.packs.offsets[indices + 1] - first
        chosen = ranges(first, count)
        row_of_piece = np.repeat(np.arange(rows), count)
        run_of_piece = np.arange(len(chosen)) + row_of_piece
        run_of_padding = np.cumsum(count + 1) - 1
        start = np.zeros(len(chosen) + rows, np.int64)
        length = np.zeros(len(chosen) + rows, np.int64)
        start[run_of_piece] = self.packs.pieces.start[chosen]
        length[run_of_piece] = self.packs.pieces.length[chosen]
        filled = np.bincount(row_of_piece, length[run_of_piece], rows).astype(np.int64)
        length[run_of_padding] = self.seq_len - filled
        end = np.cumsum(length)
        begin = end - length

        place = np.arange(len(input_ids))
        np.subtract(place, np.repeat(begin, length), out=position_ids)
        source = np.repeat(start, length)
        source += position_ids
        tokens = self.store.tokens
        # Padding reads from the file's start and may run past the end of a small file: clipped, then overwritten.
        input_ids[:] = tokens.take(source, mode="clip")
        labels[:-1] = input_ids[1:]
        last = end[run_of_piece] - 1
        next_token = tokens.take((start + length)[run_of_piece], mode="clip").astype(np.int64)
        labels[last] = np.where(self.packs.pieces.continues[chosen], next_token, IGNORE_INDEX)
        if self.store.loss_mask is not None:
            source += 1
            labels[self.store.loss_mask.take(source, mode="clip") == 0] = IGNORE_INDEX
        padding = ranges(begin[run_of_padding], length[run_of_padding])
        input_ids[padding] = self.padding_token_id
        labels[padding] = IGNORE_INDEX
