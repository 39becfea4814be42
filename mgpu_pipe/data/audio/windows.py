"""Fixed windows of spectrograms by model: log-mel spectrograms, filter banks, or none."""

from __future__ import annotations

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.filter_bank import FilterBank
from mgpu_pipe.data.audio.log_mel import LogMel


def window_of(model: ModelConfig, rate: int) -> LogMel | FilterBank | None:
    """The window that ``model`` reads at ``rate`` samples a second; None where it reads waveforms.

    Raises:
        ConfigError, ModelFolderError: the window does not fit the model.
    """
    return LogMel.from_model(model, rate) or FilterBank.from_model(model, rate)
