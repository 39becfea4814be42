"""Spectrograms of a window of fixed length, as encoders such as Whisper's read them. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.alphabet import PREPROCESSOR
from mgpu_pipe.data.audio.decode import Wave
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.errors import ConfigError, ModelFolderError
from mgpu_pipe.families.config_source import config_class

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

FIELDS = ("num_mel_bins", "max_source_positions", "max_target_positions")
FRAMES_A_POSITION = 2
"""The encoder's second convolution takes every other frame."""


def reads_spectrograms(model: ModelConfig) -> bool:
    return set(FIELDS) <= _usual(model).keys()


def _usual(model: ModelConfig) -> Mapping[str, Any]:
    known = config_class(str(model_field(model, "model_type") or model.type))
    return known.defaults if known else {}


@dataclass(frozen=True)
class LogMel:
    """Attributes:
    bins: mel bands of a frame.
    rate: samples a second.
    seconds: of the window, to which a recording is filled up with silence.
    hop: samples from one frame to the next.
    width: samples of a frame.
    most_tokens: that the model writes at most.
    """

    bins: int
    rate: int
    seconds: int
    hop: int = 160
    width: int = 400
    most_tokens: int = 448

    @classmethod
    def of(cls, model: ModelConfig, rate: int) -> LogMel | None:
        """What a model reads; None where it reads waveforms.

        Raises:
            ConfigError: a window that is no whole number of seconds.
            ModelFolderError: its folder makes other windows than its model takes.
        """
        if not reads_spectrograms(model):
            return None
        usual = _usual(model)
        bins, positions, most = (int(model_field(model, name) or usual[name]) for name in FIELDS)
        file = None if model.path is None else local_folder(model.path) / PREPROCESSOR
        said = json_file(file) if file is not None and file.is_file() else {}
        hop, width = (_size(said.get(name), own) for name, own in (("hop_length", 160), ("n_fft", 400)))
        samples = positions * FRAMES_A_POSITION * hop
        if samples % rate:
            whole = rate // np.gcd(rate, FRAMES_A_POSITION * hop)
            reason = f"its window is {samples / rate:g} s at {rate} samples a second"
            raise ConfigError("model.config.max_source_positions", positions, f"use a multiple of {whole}", reason)
        given = {"feature_size": bins, "chunk_length": samples // rate}
        apart = [f"{name}={said[name]}, not {value}" for name, value in given.items() if said.get(name, value) != value]
        if apart:
            raise ModelFolderError(f"{file}: does not fit the model: {'; '.join(apart)}; give the model's own folder")
        return cls(bins, rate, samples // rate, hop, width, most)

    @property
    def frames(self) -> int:
        return self.seconds * self.rate // self.hop

    def fault(self, numbers: Sequence[int], samples: int) -> str | None:
        """Why a transcript of these tokens cannot be learnt from a recording of so many samples."""
        if samples > self.seconds * self.rate:
            return f"lasts {samples / self.rate:.1f} s; the model's window has {self.seconds} s"
        if len(numbers) > self.most_tokens:
            return f"has a text of {len(numbers)} tokens; the model writes at most {self.most_tokens}"
        return None

    def of_waves(self, waves: Sequence[Wave]) -> NDArray[np.float32]:
        """Of recordings at :attr:`rate`, shape (recordings, bins, frames); each is of its recording alone.

        Frames of the silence behind the longest recording are all like their first, and computed once.
        """
        heard = -(-(max(map(len, waves)) + self.width) // self.hop)
        if heard >= self.frames:
            return np.ascontiguousarray(self._extracted(waves, self.frames), np.float32)
        found = self._extracted(waves, heard)
        whole = np.empty((len(waves), self.bins, self.frames), np.float32)
        whole[:, :, :heard], whole[:, :, heard:] = found, found[:, :, -1:]
        return whole

    def _extracted(self, waves: Sequence[Wave], frames: int) -> NDArray[np.float32]:
        found = self._extractor(list(waves), sampling_rate=self.rate, max_length=frames * self.hop, return_tensors="np")
        values: NDArray[np.float32] = found.input_features
        return values

    @cached_property
    def _extractor(self) -> WhisperFeatureExtractor:
        from transformers import WhisperFeatureExtractor

        return WhisperFeatureExtractor(**self.settings())

    def settings(self) -> Mapping[str, Any]:
        """As transformers keeps them."""
        return {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": self.bins,
            "sampling_rate": self.rate,
            "chunk_length": self.seconds,
            "hop_length": self.hop,
            "n_fft": self.width,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": False,
        }


def _size(said: Any, usual: int) -> int:
    return said if isinstance(said, int) and said > 0 else usual
