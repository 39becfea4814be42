"""Log-mel spectrograms of a fixed window, for encoders such as Whisper's. Imports torch only when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.architectures.family import (
    FEWEST_FRAMES,
    FRAMES_A_POSITION,
    SECOND,
    TOKENS_A_SECOND,
    frame_tokens,
    second_tokens,
    sound_tokens,
)
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.decode_audio import Wave
from mgpu_pipe.data.model_field import check_extractor, model_field, preprocessor_of
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

CHUNKED_SECONDS = 300
"""Seconds of the longest recording that an encoder of chunks gets where the model's folder says nothing."""
USUAL_RATE = 16000
"""Samples a second where the model's folder says nothing."""
_WIDTHS = (("hidden_size", "d_model"), ("intermediate_size", "encoder_ffn_dim"))
"""Fields of an encoder's width and of that of the joined vectors, each by two names."""
FRAMES_SECONDS = 30
"""Seconds of the longest recording that Gemma 4's extractor does not cut."""
_STEPS = (
    *("min_frequency", "max_frequency", "preemphasis", "preemphasis_htk_flavor", "fft_overdrive", "input_scale_factor"),
    *("mel_floor", "per_bin_mean", "per_bin_stddev", "padding_value", "padding_side"),
)
"""Settings of Gemma 4's extractor that a folder may state; noise (``dither``) is left out."""
FIELDS = ("num_mel_bins", "max_source_positions", "max_target_positions")


def reads_spectrograms(model: ModelConfig) -> bool:
    return set(FIELDS) <= _usual(model).keys()


def _usual(model: ModelConfig) -> Mapping[str, Any]:
    known = config_class(str(model_field(model, "model_type") or model.type))
    return known.defaults if known else {}


@dataclass(frozen=True)
class LogMel:
    """Settings of a model's spectrograms.

    Attributes:
        bins: mel bands of a frame.
        rate: samples a second.
        seconds: of the window, to which a recording is filled up with silence.
        hop: samples from one frame to the next.
        width: samples of a frame.
        most_tokens: longest transcript of the model.
        fixed: whether the model reads the silence after a recording, up to the window's end.
        filled: tokens of each recording in a conversation, where silence gets some; 0: by its frames.
        in_seconds: whether the model reads the seconds of a recording alone.
    """

    bins: int
    rate: int
    seconds: int
    hop: int = 160
    width: int = 400
    most_tokens: int = 448
    fixed: bool = True
    filled: int = 0
    in_seconds: bool = False

    input_name = "input_features"
    """The model's argument."""

    @classmethod
    def from_model(cls, model: ModelConfig, rate: int) -> LogMel | None:
        """Settings of ``model`` at ``rate``, None for waveforms; ConfigError or ModelFolderError for a window that does
        not fit."""
        if not reads_spectrograms(model):
            return None
        usual = _usual(model)
        bins, positions, most = (int(model_field(model, name) or usual[name]) for name in FIELDS)
        return cls._from_sizes(model, rate, "model.config", (bins, positions, most))

    @classmethod
    def from_tower(cls, model: ModelConfig) -> LogMel:
        """Reads the settings of a model that hears recordings in conversations; raises like :meth:`from_model`."""
        part = model_field(model, "audio_config") or {}
        kind = str(model.type or model_field(model, "model_type"))
        family = kind.removesuffix("_thinker")
        names = (part.get("model_type"), f"{family}_encoder", f"{family}_audio_encoder")
        usual = next(known.defaults for name in names if name and (known := config_class(str(name))))
        bins, positions = (int(part.get(name) or usual[name]) for name in FIELDS[:2])
        said = preprocessor_of(model.path, "feature_extractor")
        rate = _size(said.get("sampling_rate"), USUAL_RATE)
        if (recordings := family_of(kind).recordings) in ("chunks", "seconds"):
            hop, width = _size(said.get("hop_length"), cls.hop), _size(said.get("n_fft"), cls.width)
            seconds, in_seconds = _size(said.get("chunk_length"), CHUNKED_SECONDS), recordings == "seconds"
            if in_seconds and (half := int(part.get("n_window") or usual["n_window"])) != SECOND // 2:
                reason = f"transformers gives {TOKENS_A_SECOND} tokens to each piece, whatever its frames"
                raise ConfigError("model.config.audio_config.n_window", half, f"use {SECOND // 2}", reason)
            return cls(bins, rate, seconds, hop, width, fixed=False, in_seconds=in_seconds)
        window = cls._from_sizes(model, rate, "model.config.audio_config", (bins, positions, cls.most_tokens))
        if family_of(kind).recordings == "window":
            return window
        width, inner = (int(_first_said(part, *names) or usual[names[0]]) for names in _WIDTHS)
        if positions * width % inner:
            reason = f"{positions} vectors of {width} values make no whole vectors of {inner}"
            raise ConfigError("model.config.audio_config.intermediate_size", inner, "use a divisor", reason)
        return replace(window, filled=positions * width // inner)

    @classmethod
    def _from_sizes(cls, model: ModelConfig, rate: int, key: str, sizes: tuple[int, int, int]) -> LogMel:
        """Window of these bands, positions and tokens."""
        bins, positions, most = sizes
        said = preprocessor_of(model.path, "feature_extractor")
        hop, width = (_size(said.get(name), default) for name, default in (("hop_length", 160), ("n_fft", 400)))
        samples = positions * FRAMES_A_POSITION * hop
        if samples % rate:
            whole = rate // np.gcd(rate, FRAMES_A_POSITION * hop)
            reason = f"its window is {samples / rate:g} s at {rate} samples a second"
            raise ConfigError(f"{key}.max_source_positions", positions, f"use a multiple of {whole}", reason)
        ours = {"feature_size": bins, "chunk_length": samples // rate}
        check_extractor(model, said, ours)
        return cls(bins, rate, samples // rate, hop, width, most)

    @property
    def frames(self) -> int:
        return self.seconds * self.rate // self.hop

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a recording's features."""
        return self.bins, self.frames

    @property
    def fewest_samples(self) -> int:
        return 1

    @property
    def most_samples(self) -> int:
        """Samples of the longest recording that the window holds."""
        return self.seconds * self.rate

    def by_band(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """A view of a recording's features, shape (bins, frames)."""
        return features

    def num_frames(self, samples: Any) -> Any:
        """Frames of recordings without the silence after them, a number or an array."""
        return -(-samples // self.hop)

    def identity(self) -> dict[str, Any]:
        """Settings for the digest of the data; those of older data lack the fields that came later."""
        usual = {"fixed": True, "filled": 0, "in_seconds": False, "extractor": {}}
        return {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}

    def num_tokens(self, frames: Any) -> Any:
        """Tokens of recordings of so many frames in a conversation, a number or an array."""
        if self.filled:
            return 0 * frames + self.filled
        return second_tokens(frames) if self.in_seconds else sound_tokens(frames)

    def chat_fault(self, samples: int) -> str:
        """Why a recording of this length in samples cannot stand in a conversation; empty if it can."""
        if samples > self.most_samples:
            return f"lasts {samples / self.rate:.1f} s; the model's window has {self.seconds} s"
        if self.num_frames(samples) < FEWEST_FRAMES:
            least = (FEWEST_FRAMES - 1) * self.hop / self.rate
            return f"lasts {samples / self.rate:.2f} s; the model needs more than {least:g} s"
        return ""

    def fault(self, numbers: Sequence[int], samples: int) -> str | None:
        """Why a recording of these samples cannot teach a transcript of these tokens; empty if it can."""
        if samples > self.seconds * self.rate:
            return f"lasts {samples / self.rate:.1f} s; the model's window has {self.seconds} s"
        if len(numbers) > self.most_tokens:
            return f"has a text of {len(numbers)} tokens; the model writes at most {self.most_tokens}"
        return None

    def extract(self, waves: Sequence[Wave]) -> NDArray[np.float32]:
        """Spectrograms of recordings, (recordings, bins, frames), each alone; the frames of silence after the longest
        are equal."""
        frames = -(-(max(map(len, waves)) + self.width) // self.hop)
        if frames >= self.frames:
            return np.ascontiguousarray(self._extract_frames(waves, self.frames), np.float32)
        features = self._extract_frames(waves, frames)
        whole = np.empty((len(waves), self.bins, self.frames), np.float32)
        whole[:, :, :frames], whole[:, :, frames:] = features, features[:, :, -1:]
        return whole

    def spectrogram(self, wave: Wave) -> NDArray[np.float32]:
        """Spectrogram of a recording as the model reads it, (bins, frames)."""
        if self.fixed:
            return self.extract([wave])[0]
        values = self._extract_frames([wave], -(-(len(wave) + self.width) // self.hop))[0]
        return np.ascontiguousarray(values[:, : self.num_frames(len(wave))], np.float32)

    def _extract_frames(self, waves: Sequence[Wave], frames: int) -> NDArray[np.float32]:
        extracted = self._extractor(
            list(waves), sampling_rate=self.rate, max_length=frames * self.hop, return_tensors="np"
        )
        values: NDArray[np.float32] = extracted.input_features
        return values

    @cached_property
    def _extractor(self) -> WhisperFeatureExtractor:
        from transformers import WhisperFeatureExtractor

        return WhisperFeatureExtractor(**self.settings())

    def settings(self) -> Mapping[str, Any]:
        """Settings in the form of transformers' feature extractor."""
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


@dataclass(frozen=True)
class FrameMel(LogMel):
    """Spectrograms of Gemma 4: a recording alone, by transformers' ``Gemma4AudioFeatureExtractor``.

    Attributes:
        extractor: settings of the folder's extractor.
    """

    fixed: bool = False
    extractor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_tower(cls, model: ModelConfig) -> FrameMel:
        part = model_field(model, "audio_config") or {}
        kind = str(model.type or model_field(model, "model_type"))
        known = config_class(str(part.get("model_type") or f"{kind}_audio"))
        channels = (
            part.get("subsampling_conv_channels") or (known.defaults if known else {})["subsampling_conv_channels"]
        )
        said = preprocessor_of(model.path, "feature_extractor")
        check_extractor(model, said, {"feature_size": channels[0]})  # the encoder's bands
        rate = _size(said.get("sampling_rate"), USUAL_RATE)
        frame, hop = (
            float(said.get(name) or usual) for name, usual in (("frame_length_ms", 20), ("hop_length_ms", 10))
        )
        steps = {name: said[name] for name in _STEPS if said.get(name) is not None}
        hop_samples, frame_samples = (round(rate * milliseconds / 1000) for milliseconds in (hop, frame))
        return cls(int(channels[0]), rate, FRAMES_SECONDS, hop_samples, frame_samples, extractor=steps)

    def num_frames(self, samples: Any) -> Any:
        return (samples + self.width // 2 - self.width - 1) // self.hop + 1

    def num_tokens(self, frames: Any) -> Any:
        return frame_tokens(frames)

    def extract(self, waves: Sequence[Wave]) -> NDArray[np.float32]:
        """Spectrograms of recordings of one length as the extractor gives them, shape (recordings, frames, bins)."""
        features: NDArray[np.float32] = self._extractor(list(waves), return_tensors="np")["input_features"]
        return features

    def spectrogram(self, wave: Wave) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.extract([wave])[0][: self.num_frames(len(wave))].T)

    @cached_property
    def _extractor(self) -> Any:
        from transformers import Gemma4AudioFeatureExtractor

        return Gemma4AudioFeatureExtractor(**self.settings())

    def settings(self) -> Mapping[str, Any]:
        return {
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
            "feature_size": self.bins,
            "sampling_rate": self.rate,
            "frame_length_ms": 1000 * self.width / self.rate,
            "hop_length_ms": 1000 * self.hop / self.rate,
            **self.extractor,
        }


def _first_said(part: Mapping[str, Any], *names: str) -> Any:
    return next((part[name] for name in names if part.get(name) is not None), None)


def _size(said: Any, usual: int) -> int:
    return said if isinstance(said, int) and said > 0 else usual
