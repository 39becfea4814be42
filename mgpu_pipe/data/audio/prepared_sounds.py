"""Prepared recordings of any kind: the cache folders of a scan, and the order of a run over them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.listen import Sound, prepare_recordings
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.cache import Progress, no_progress, read_manifest, run_cache
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
    def indices(self, split: Split) -> NDArray[np.int64]:
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
        lengths = self.shown_lengths(self.folder)[self.indices("train")]
        return SortedSteps(order, lengths, data.global_batch_size, data.sort_steps)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.recordings, "recordings"), (round(60 * self.hours), "minutes"), *self.left_out()]

    def context(self, data: DataConfig) -> float:
        return 0.0


@dataclass(frozen=True)
class SoundScan:
    """Result of :func:`scan_recordings`.

    Attributes:
        folder, held_out_folder: of the cache, see :mod:`mgpu_pipe.data.audio.prepare_audio`.
        fraction: held-out share, see :class:`~mgpu_pipe.data.prepared_splits.PreparedSplits`.
        manifests: of both folders, or of the one.
    """

    folder: Path
    held_out_folder: Path
    fraction: float
    manifests: list[dict[str, Any]]
    sound: Sound

    def fields(self) -> dict[str, Any]:
        """Constructor fields of prepared recordings that the scan decides."""
        return {
            "folder": self.folder,
            "held_out_folder": self.held_out_folder,
            "fraction": self.fraction,
            "recordings": sum(manifest["recordings"] for manifest in self.manifests),
            "hours": sum(manifest["seconds"] for manifest in self.manifests) / 3600,
        }


def scan_recordings(model: ModelConfig, data: AudioConfig, progress: Progress | None) -> SoundScan:
    """Scans the recordings of ``data``, or finds the scan; ConfigError for paths, rate or packages, DataError for
    lists."""
    sound = Sound.from_config(data, model)
    with run_cache(data) as cache:
        folder, held_folder = prepare_recordings(data, sound, cache, progress or no_progress)
    is_apart = held_folder != folder or bool(data.validation_paths)
    fraction = float(held_folder == folder) if is_apart else data.validation_fraction
    manifests = [read_manifest(each) or {} for each in dict.fromkeys((folder, held_folder))]
    return SoundScan(folder, held_folder, fraction, manifests, sound)


def bad_in(manifests: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names of the recordings that cannot be used, and why."""
    return [(name, reason) for manifest in manifests for name, reason in manifest["bad"]]
