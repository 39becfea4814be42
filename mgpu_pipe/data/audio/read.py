"""What the model gets of a recording, and reading one that was listened to before. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.alphabet import PREPROCESSOR
from mgpu_pipe.data.audio.decode import Wave, decode, resampled
from mgpu_pipe.data.audio.keys import AudioConfig
from mgpu_pipe.data.audio.log_mel import reads_spectrograms
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, read_part
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.families.config_source import config_class
from mgpu_pipe.families.frames import Frames

USUAL_RATE = 16000
_LEAST_VARIANCE = 1e-7
"""As of transformers' Wav2Vec2FeatureExtractor."""


@dataclass(frozen=True)
class Sound:
    """How a recording becomes the model's input.

    Attributes:
        rate: samples a second.
        normalise: to mean 0 and variance 1, each recording by itself.
    """

    rate: int
    normalise: bool = True

    @classmethod
    def of(cls, data: AudioConfig, model: ModelConfig) -> Sound:
        """Of a run.

        Raises:
            ConfigError: another rate than the model was trained on.
            ModelFolderError: its folder does not say it readably.
        """
        file = None if model.path is None else local_folder(model.path) / PREPROCESSOR
        said = json_file(file) if file is not None and file.is_file() else {}
        own = said.get("sampling_rate")
        if isinstance(own, int) and data.sampling_rate not in ("auto", own):
            reason = f"the model was trained on {own} samples a second"
            raise ConfigError("data.sampling_rate", data.sampling_rate, "leave it out", reason)
        usual = own if isinstance(own, int) and own > 0 else USUAL_RATE
        rate = usual if data.sampling_rate == "auto" else data.sampling_rate
        return cls(rate, bool(said.get("do_normalize", not reads_spectrograms(model))))

    def changed(self, wave: Wave, data: AudioConfig, random: np.random.Generator) -> Wave:
        """A training recording: faster or slower, and with noise, at random."""
        rate, loudness = random.uniform(-1, 1), random.random()
        if data.speed:
            wave = resampled(wave, 1 / (1 + data.speed * rate))
        if data.noise:
            level = np.float32(data.noise * loudness * np.sqrt(np.square(wave, dtype=np.float64).mean()))
            wave = wave + level * random.standard_normal(len(wave), np.float32)
        return wave

    def fitted(self, wave: Wave) -> Wave:
        if not self.normalise:
            return wave
        values = wave.astype(np.float64)
        normed: Wave = ((values - values.mean()) / np.sqrt(values.var() + _LEAST_VARIANCE)).astype(np.float32)
        return normed


def frames_of(model: ModelConfig) -> Frames:
    """What its convolutions make of a recording."""
    known = config_class(str(model_field(model, "model_type") or model.type))
    usual = known.defaults if known else {}
    return Frames.of_fields({name: model_field(model, name) or usual[name] for name in ("conv_kernel", "conv_stride")})


def read_recording(path: Path, expected: Fingerprint, rate: int, max_seconds: float) -> Wave:
    """A recording that holds what it held when it was listened to.

    Raises:
        BadAudioError: it cannot be used.
        DataError: it is gone, or another one.
    """
    try:
        return decode(read_part(path, expected), rate, max_seconds)
    except ChangedFileError as error:
        raise DataError(f"{path}: changed since the recordings were listened to; start the run again") from error
