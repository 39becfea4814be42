"""Spectrograms of CLAP (Wu et al. 2023, arXiv:2211.06687), as transformers' ``ClapFeatureExtractor`` computes them.

A recording shorter than the window is repeated as often as it fits, then silence follows. Parts of longer recordings
are drawn by sample (:mod:`mgpu_pipe.data.audio.recordings`); the extractor draws them by numpy's global generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.decode_audio import Wave
from mgpu_pipe.data.model_field import check_extractor, model_field, preprocessor_of
from mgpu_pipe.errors import ModelFolderError

if TYPE_CHECKING:
    from transformers import ClapFeatureExtractor

RATE = 48_000
"""Samples a second where the model's folder says nothing."""
DEFAULTS: Mapping[str, Any] = {
    **{"hop_length": 480, "max_length_s": 10, "fft_window_size": 1024},
    **{"frequency_min": 0, "frequency_max": 14_000, "padding": "repeatpad", "truncation": "rand_trunc"},
}
"""Settings where the model's folder says nothing; the extractor's own ``truncation`` is ``fusion``."""


def reads_clap_spectrograms(model: ModelConfig) -> bool:
    return _kind(model) in families_in_role("sound_and_text")


def _kind(model: ModelConfig) -> str:
    return str(model_field(model, "model_type") or model.type)


@dataclass(frozen=True)
class ClapMel:
    """Settings of a model's spectrograms.

    Attributes:
        bins: mel bands of a frame.
        rate: samples a second.
        said: settings of the extractor that :data:`DEFAULTS` names.
    """

    bins: int
    rate: int
    said: Mapping[str, Any]

    input_name = "input_features"
    """The model's argument."""
    fewest_samples = 1

    @classmethod
    def from_model(cls, model: ModelConfig, rate: int) -> ClapMel | None:
        """Reads the settings of ``model``, None if it reads something else; ModelFolderError if they do not fit."""
        if not reads_clap_spectrograms(model):
            return None
        known = config_class(f"{_kind(model)}_audio_model")
        part = {**(known.defaults if known else {}), **(model_field(model, "audio_config") or {})}
        said = preprocessor_of(model.path, "feature_extractor")
        bins = int(part["num_mel_bins"])
        check_extractor(model, said, {"feature_size": bins})
        settings = {name: usual if said.get(name) is None else said[name] for name, usual in DEFAULTS.items()}
        if part["enable_fusion"] or settings["truncation"] != "rand_trunc":
            what = (
                "audio_config.enable_fusion=true" if part["enable_fusion"] else f"truncation={settings['truncation']}"
            )
            reason = f"{what} joins several spectrograms of a long recording, which is not supported"
            raise ModelFolderError(f"{model.path}: {reason}; use a folder without, such as clap-htsat-unfused")
        window = cls(bins, rate, settings)
        most = int(part["spec_size"]) * (int(part["spec_size"]) // bins)
        if model.path is not None and window.shape[1] > most:
            reason = f"its extractor makes {window.shape[1]} frames, and its model takes {most}"
            raise ModelFolderError(f"{model.path}: {reason}; give the model's own folder")
        return window

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return int(self.said["hop_length"])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a recording's features: (1, frames, bins)."""
        return 1, self.most_samples // self.hop + 1, self.bins

    @property
    def most_samples(self) -> int:
        """Samples of the window."""
        return int(self.said["max_length_s"]) * self.rate

    def by_band(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """A view of a recording's features, shape (bins, frames)."""
        return features[0].T

    def extract(self, waves: Sequence[Wave]) -> NDArray[np.float32]:
        """Spectrograms in decibels of recordings that are not longer than the window, (recordings, 1, frames, bins);
        none depends on the others."""
        extracted = self._extractor(list(waves), sampling_rate=self.rate, return_tensors="np")
        return np.ascontiguousarray(extracted["input_features"], np.float32)

    @cached_property
    def _extractor(self) -> ClapFeatureExtractor:
        from transformers import ClapFeatureExtractor

        return ClapFeatureExtractor(**self.settings())

    def settings(self) -> Mapping[str, Any]:
        """Settings in the form of transformers' feature extractor."""
        return {
            "feature_extractor_type": "ClapFeatureExtractor",
            "feature_size": self.bins,
            "sampling_rate": self.rate,
            **self.said,
            "padding_value": 0.0,
            "padding_side": "right",
            "return_attention_mask": False,
        }
