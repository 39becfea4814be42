"""Preflight checks of recordings, before any is decoded."""

from __future__ import annotations

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.decode_audio import soundfile
from mgpu_pipe.data.audio.listen import Sound, listed
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.speech_keys import AudioConfig
from mgpu_pipe.data.audio.speech_source import speaker_of
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.errors import check_all


def check_recordings(model: ModelConfig, data: DataConfig) -> None:
    """Checks that packages and programs exist, lists name files, and the model takes such recordings.

    Raises:
        ConfigErrors: the errors found.
    """
    assert isinstance(data, AudioConfig)
    checks = [
        *(soundfile, lambda: LogMel.from_model(model, Sound.from_config(data, model).rate)),
        lambda: check_rule(data),
    ]
    if speaker_of(data) is None:
        checks.append(lambda: listed(data, data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: listed(data, data.validation_paths, "data.validation_paths"))
    check_all(checks)
