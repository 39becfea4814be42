"""Log filter banks of a fixed window, for the Audio Spectrogram Transformer (Gong et al. 2021, arXiv:2104.01778).

Kaldi's, as transformers' ``ASTFeatureExtractor`` computes them without torchaudio; with it, that class calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.clap_mel import ClapMel
from mgpu_pipe.data.audio.decode_audio import Wave
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.model_field import check_extractor, model_field, preprocessor_of

FAMILY = "audio-spectrogram-transformer"
WIDTH, HOP, FREQUENCIES = 400, 160, 257
"""Samples of a frame and from one frame to the next; frequencies of its spectrum."""
LOWEST, PREEMPHASIS, FLOOR = 20, 0.97, 1.192092955078125e-07
"""Lowest frequency in Hz; Kaldi's pre-emphasis; least energy of a band (the epsilon of float32)."""
MEAN, DEVIATION = -4.2677393, 4.5689974
"""Mean and standard deviation of AudioSet's filter banks, the defaults of ASTFeatureExtractor."""


def reads_filter_banks(model: ModelConfig) -> bool:
    return (model_field(model, "model_type") or model.type) == FAMILY


@dataclass(frozen=True)
class FilterBank:
    """Settings of a model's filter banks.

    Attributes:
        bins: mel bands of a frame.
        rate: samples a second.
        frames: of the window, to which a recording is filled up.
        mean, deviation: the values become ``(value - mean) / (2 * deviation)``.
    """

    bins: int
    rate: int
    frames: int
    mean: float = MEAN
    deviation: float = DEVIATION

    input_name = "input_values"
    """The model's argument."""
    hop = HOP

    @classmethod
    def from_model(cls, model: ModelConfig, rate: int) -> FilterBank | None:
        """Reads the settings of ``model``, None if it reads something else; ModelFolderError if they do not fit."""
        if not reads_filter_banks(model):
            return None
        known = config_class(FAMILY)
        usual = known.defaults if known else {}
        bins, frames = (int(model_field(model, name) or usual[name]) for name in ("num_mel_bins", "max_length"))
        said = preprocessor_of(model.path, "feature_extractor")
        ours = {"num_mel_bins": bins, "max_length": frames}
        check_extractor(model, said, ours)
        if said.get("do_normalize", True) is False:
            return cls(bins, rate, frames, 0.0, 0.5)
        return cls(bins, rate, frames, float(said.get("mean", MEAN)), float(said.get("std", DEVIATION)))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a recording's features."""
        return self.frames, self.bins

    @property
    def fewest_samples(self) -> int:
        return WIDTH

    @property
    def most_samples(self) -> int:
        """Samples of the longest recording that the window holds."""
        return (self.frames - 1) * HOP + WIDTH

    def by_band(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """A view of a recording's features, shape (bins, frames)."""
        return features.T

    def extract(self, waves: Sequence[Wave]) -> NDArray[np.float32]:
        """Filter banks of recordings at :attr:`rate`, shape (recordings, frames, bins); none depends on the others."""
        from transformers.audio_utils import spectrogram

        features = np.zeros((len(waves), *self.shape), np.float32)
        for row, wave in enumerate(waves):
            bank = spectrogram(
                wave,
                self._window,
                frame_length=WIDTH,
                hop_length=HOP,
                fft_length=2 * (FREQUENCIES - 1),
                power=2.0,
                center=False,
                preemphasis=PREEMPHASIS,
                mel_filters=self._filters,
                log_mel="log",
                mel_floor=FLOOR,
                remove_dc_offset=True,
            ).T[: self.frames]
            features[row, : len(bank)] = bank
        normed: NDArray[np.float32] = (features - np.float32(self.mean)) / np.float32(2 * self.deviation)
        return normed

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        from transformers.audio_utils import mel_filter_bank

        filters: NDArray[np.float64] = mel_filter_bank(
            num_frequency_bins=FREQUENCIES,
            num_mel_filters=self.bins,
            min_frequency=LOWEST,
            max_frequency=self.rate // 2,
            sampling_rate=self.rate,
            norm=None,
            mel_scale="kaldi",
            triangularize_in_mel_space=True,
        )
        return filters

    @cached_property
    def _window(self) -> NDArray[np.float64]:
        from transformers.audio_utils import window_function

        window: NDArray[np.float64] = window_function(WIDTH, "hann", periodic=False)
        return window

    def settings(self) -> Mapping[str, Any]:
        """Settings in the form of transformers' feature extractor."""
        return {
            "feature_extractor_type": "ASTFeatureExtractor",
            "feature_size": 1,
            "num_mel_bins": self.bins,
            "sampling_rate": self.rate,
            "max_length": self.frames,
            "do_normalize": True,
            "mean": self.mean,
            "std": self.deviation,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": False,
        }


Window = LogMel | FilterBank | ClapMel
"""Spectrograms of a fixed window."""


def window_of(model: ModelConfig, rate: int) -> Window | None:
    """Window that ``model`` reads at ``rate``, None for waveforms; ConfigError or ModelFolderError if it does not
    fit."""
    return LogMel.from_model(model, rate) or FilterBank.from_model(model, rate) or ClapMel.from_model(model, rate)
