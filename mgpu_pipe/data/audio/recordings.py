"""Recordings, and their transcripts or classes, as tensors, padded to the longest of a batch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.decode_audio import Wave
from mgpu_pipe.data.audio.listen import FILES, WAVES, Sound, read_recording, stored_wave
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.samples import Split, random_of
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.caption_tokens import TABLE
from mgpu_pipe.data.text.token_store import load_array

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
    from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds
    from mgpu_pipe.data.audio.prepare_sound_captions import PreparedSoundCaptions
    from mgpu_pipe.data.audio.prepared_sounds import PreparedSounds


_KEY = 0x5BEC
"""Key that separates these random numbers from those that change the recording."""
_PART_KEY = 0x9A27
"""Key of the random numbers that choose a part of a recording."""


@dataclass(frozen=True)
class Spans:
    """Spans that SpecAugment hides.

    Attributes:
        share: of the places that begin a span, times its length.
        length: of a span.
        fewest: spans of a sample.
    """

    share: float
    length: int
    fewest: int

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], which: str) -> Spans:
        """Reads the spans of a model's configuration; ``which`` is time or feature."""
        if not fields.get("apply_spec_augment", True):
            return cls(0.0, 1, 0)
        share, length, fewest = (fields.get(f"mask_{which}_{name}", 0) for name in ("prob", "length", "min_masks"))
        return cls(float(share), int(length), int(fewest))

    def draw_mask(self, places: int, random: np.random.Generator) -> NDArray[np.bool_]:
        """Draws which of ``places`` lie in a span."""
        hidden = np.zeros(places, np.bool_)
        starts = places - self.length + 1
        if not self.share or starts < 1:
            return hidden
        number = max(int(self.share * places / self.length + random.random()), self.fewest)
        for start in random.permutation(starts)[: min(number, places // self.length)]:
            hidden[start : start + self.length] = True
        return hidden


def random_of_spans(seed: int, number: int) -> np.random.Generator:
    """Random numbers for the spans of the sample with this number."""
    return random_of(seed ^ _KEY << 32, number)


class SoundSamples(ABC):
    """One split of recordings, a :class:`mgpu_pipe.data.samples.SampleSet`; a subclass adds what is known of each.

    Args:
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(
        self,
        seed: int,
        model: ModelConfig,
        data: DataConfig,
        split: Split,
        prepared: PreparedSounds,
        reopen: Callable[[], SoundSamples],
    ) -> None:
        assert isinstance(data, AudioConfig)
        self._data, self._seed, self._split, self._reopen = data, seed, split, reopen
        self._sound = Sound.from_config(data, model)
        folder, self._recordings = prepared.folder_of(split), prepared.indices(split)
        self._waves, self._files = None, dict[str, Any]()
        if (folder / WAVES).is_file():
            self._waves = load_array(folder / WAVES)
            self._borders = np.concatenate([[0], np.cumsum(load_array(folder / "lengths.npy"))])
        else:
            self._files = json.loads((folder / FILES).read_text(encoding="utf-8"))
        self.open_labels(prepared, split)

    @abstractmethod
    def open_labels(self, prepared: Any, split: Split) -> None:
        """Opens what is known of each recording of a split."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as ``reopen``: another process opens the files itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._recordings)

    @abstractmethod
    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Units that the samples add to the loss denominator, without reading them."""

    def positions(self, indices: NDArray[np.int64]) -> int:
        return 0

    def padding(self, indices: NDArray[np.int64]) -> int:
        return 0

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """``input_values``, float32 (rows, samples), and ``lengths`` without padding, (rows,), of ``indices``."""
        waves = [
            self.model_input(index, number) for index, number in zip(indices.tolist(), numbers.tolist(), strict=True)
        ]
        values = np.zeros((len(waves), max(map(len, waves))), np.float32)
        for row, wave in enumerate(waves):
            values[row, : len(wave)] = wave
        lengths = np.array([len(wave) for wave in waves], np.int64)
        return {"input_values": torch.from_numpy(values), "lengths": torch.from_numpy(lengths)}

    def model_input(self, index: int, number: int) -> Wave:
        """The model's input for a recording: with random changes in training, then normalised."""
        return self._sound.standardise(self._change(self.recording(index), number))

    def _change(self, wave: Wave, number: int) -> Wave:
        if self._split == "train" and (self._data.speed or self._data.noise):
            return self._sound.augment(wave, self._data, random_of(self._seed, number))
        return wave

    def recording(self, index: int) -> Wave:
        """The unchanged recording at the model's rate."""
        number = int(self._recordings[index])
        if self._waves is not None:
            return stored_wave(self._waves, self._borders, number)
        known = Fingerprint(self._files["sizes"][number], tuple(self._files["blocks"][number]))
        return read_recording(Path(self._files["paths"][number]), known, self._sound.rate, self._data.max_seconds)


class SpeechSamples(SoundSamples):
    """Recordings with transcripts."""

    def open_labels(self, prepared: PreparedSpeech, split: Split) -> None:
        self._between_words = prepared.alphabet().between_words
        labels, among = prepared.labels_of(split), prepared.among_kept(split)
        starts = load_array(labels / "starts.npy")
        self._numbers, self._start, self._end = load_array(labels / "labels.npy"), starts[among], starts[among + 1]

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int((self._end[indices] - self._start[indices]).sum())

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Adds ``labels``, (rows, characters), and ``between_words``, their separator of words, (rows,)."""
        written = [self.transcript(index) for index in indices.tolist()]
        labels = np.full((len(written), max(map(len, written))), IGNORE_INDEX, np.int64)
        for row, tokens in enumerate(written):
            labels[row, : len(tokens)] = tokens
        between_words = torch.full((len(written),), self._between_words)
        return {**super().batch(indices, numbers), "between_words": between_words, "labels": torch.from_numpy(labels)}

    def transcript(self, index: int) -> NDArray[np.int32]:
        """Numbers of a transcript's characters."""
        numbers: NDArray[np.int32] = self._numbers[self._start[index] : self._end[index]]
        return numbers


class LabelledSounds(SoundSamples):
    """Recordings with a class, or with several."""

    def open_labels(self, prepared: PreparedLabelledSounds | PreparedSoundCaptions, split: Split) -> None:
        self._labels, self._segment = prepared.labels(split), prepared.segment_samples

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return len(indices)

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors of the recordings ``indices``; adds ``labels``: their class, int64, (rows,), or for each class
        whether it is one of theirs, float32, (rows, classes)."""
        return {**super().batch(indices, numbers), "labels": torch.from_numpy(self._labels[indices])}

    def model_input(self, index: int, number: int) -> Wave:
        """The model's input for a part of a recording: with random changes in training, then normalised."""
        part = self._change(self.part(self.recording(index), number), number)
        return self._sound.standardise(part[: self._segment])

    def part(self, wave: Wave, number: int) -> Wave:
        """At most a segment of a recording: drawn by seed and sample in training, else its middle."""
        spare = 0 if self._segment is None else len(wave) - self._segment
        if spare <= 0:
            return wave
        is_drawn = self._split == "train" and number >= 0
        start = int(random_of(self._seed ^ _PART_KEY, number).integers(spare + 1)) if is_drawn else spare // 2
        return wave[start : start + cast(int, self._segment)]


class CaptionedSounds(LabelledSounds):
    """Recordings with captions."""

    def open_labels(self, prepared: Any, split: Split) -> None:
        super().open_labels(prepared, split)
        self._tokens, self._ids = load_array(prepared.table_of(split) / TABLE), prepared.recording_ids(split)

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Tensors of the recordings ``indices``; ``labels``, (rows,), are equal for equal captions. Adds their tokens,
        ``input_ids``, (rows, seq_len), and ``recording_ids``, (rows,), equal for equal recordings; all int64."""
        read = super().batch(indices, numbers)
        ids = self._tokens[read["labels"].numpy()].astype(np.int64)
        return {**read, "input_ids": torch.from_numpy(ids), "recording_ids": torch.from_numpy(self._ids[indices])}
