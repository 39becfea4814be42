"""Recordings and their transcripts as tensors, padded to the longest of those that are asked for together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.decode import Wave
from mgpu_pipe.data.audio.keys import AudioConfig
from mgpu_pipe.data.audio.listen import FILES, WAVES
from mgpu_pipe.data.audio.read import Sound, read_recording
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.samples import Split, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.token_store import load_array

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.prepare import PreparedSpeech


class SpeechSamples:
    """One split, a :class:`mgpu_pipe.data.samples.SampleSet`.

    Args:
        reopen: gives the same samples in another process; it can be pickled.
    """

    def __init__(
        self, config: RunConfig, split: Split, prepared: PreparedSpeech, reopen: Callable[[], SpeechSamples]
    ) -> None:
        assert isinstance(config.data, AudioConfig)
        self._data, self._seed, self._split, self._reopen = config.data, config.seed, split, reopen
        self._sound = Sound.of(config.data, config.model)
        self._between_words = prepared.alphabet().between_words
        folder, labels, among = prepared.folder_of(split), prepared.labels_of(split), prepared.among_kept(split)
        starts = load_array(labels / "starts.npy")
        self._numbers, self._start, self._end = load_array(labels / "labels.npy"), starts[among], starts[among + 1]
        self._recordings = prepared.chosen(split)
        self._waves, self._files = None, dict[str, Any]()
        if (folder / WAVES).is_file():
            self._waves = load_array(folder / WAVES)
            self._borders = np.concatenate([[0], np.cumsum(load_array(folder / "lengths.npy"))])
        else:
            self._files = json.loads((folder / FILES).read_text(encoding="utf-8"))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._recordings)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int((self._end[indices] - self._start[indices]).sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return 0

    def padding(self, indices: NDArray[np.int64]) -> int:
        return 0

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """``input_values`` of shape (rows, samples); ``lengths``, the samples that are no padding, and
        ``between_words``, what stands between words in ``labels``, of shape (rows,); ``labels`` of shape (rows,
        characters)."""
        waves = [self.heard(index, number) for index, number in zip(indices.tolist(), numbers.tolist(), strict=True)]
        values = np.zeros((len(waves), max(map(len, waves))), np.float32)
        for at, wave in enumerate(waves):
            values[at, : len(wave)] = wave
        written = [self.written(index) for index in indices.tolist()]
        labels = np.full((len(written), max(map(len, written))), IGNORE_INDEX, np.int64)
        for at, one in enumerate(written):
            labels[at, : len(one)] = one
        arrays = {
            "input_values": values,
            "lengths": np.array([len(wave) for wave in waves], np.int64),
            "between_words": np.full(len(waves), self._between_words, np.int64),
            "labels": labels,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def heard(self, index: int, number: int) -> Wave:
        """What the model gets of a recording."""
        wave = self.recording(index)
        if self._split == "train" and (self._data.speed or self._data.noise):
            wave = self._sound.changed(wave, self._data, random_of(self._seed, number))
        return self._sound.fitted(wave)

    def recording(self, index: int) -> Wave:
        """As it is, at the model's rate."""
        at = int(self._recordings[index])
        if self._waves is not None:
            stored: Wave = self._waves[self._borders[at] : self._borders[at + 1]].astype(np.float32)
            return stored / np.float32(32767)
        known = Fingerprint(self._files["sizes"][at], tuple(self._files["blocks"][at]))
        return read_recording(Path(self._files["paths"][at]), known, self._sound.rate, self._data.max_seconds)

    def written(self, index: int) -> NDArray[np.int32]:
        """The numbers of a transcript's characters."""
        numbers: NDArray[np.int32] = self._numbers[self._start[index] : self._end[index]]
        return numbers
