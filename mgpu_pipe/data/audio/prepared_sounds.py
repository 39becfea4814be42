"""Prepared recordings of any kind: the cache folders of a scan, and the order of a run over them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.order import GlobalOrder, Order, SortedSteps
from mgpu_pipe.data.prepared_splits import PreparedSplits
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.token_store import load_array


@dataclass(frozen=True, kw_only=True)
class PreparedSounds(PreparedSplits):
    """Everything a worker needs to load recordings; a subclass adds what is known of each."""

    recordings: int
    hours: float

    @abstractmethod
    def chosen(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's recordings in its folder."""

    def shown_lengths(self, folder: Path) -> NDArray[np.int64]:
        """Samples that the model gets of each recording of a folder, before any change."""
        lengths: NDArray[np.int64] = load_array(folder / "lengths.npy")
        return lengths

    def order(self, seed: int, data: DataConfig, samples: int) -> Order:
        order = super().order(seed, data, samples)
        assert isinstance(data, AudioConfig) and isinstance(order, GlobalOrder)
        if data.sort_steps == 1:
            return order
        lengths = self.shown_lengths(self.folder)[self.chosen("train")]
        return SortedSteps(order, lengths, data.global_batch_size, data.sort_steps)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.recordings, "recordings"), (round(60 * self.hours), "minutes"), *self.left_out()]

    def context(self, data: DataConfig) -> float:
        return 0.0
