"""Preflight checks of recordings, before any is decoded."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.decode_audio import soundfile
from mgpu_pipe.data.audio.filter_bank import window_of
from mgpu_pipe.data.audio.listen import Sound, listed, with_splits
from mgpu_pipe.data.audio.speech_keys import AudioConfig
from mgpu_pipe.data.audio.speech_source import speech_source
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.errors import ConfigError, ConfigErrors, check_all


def check_recordings(model: ModelConfig, data: DataConfig) -> None:
    """Checks that packages and programs exist, lists name files, and the model takes such recordings.

    Raises:
        ConfigErrors: the errors found.
    """
    assert isinstance(data, AudioConfig)
    checks = [*(soundfile, lambda: window_of(model, Sound.from_config(data, model).rate)), lambda: check_rule(data)]
    if speech_source(data).speak is None:
        try:
            paths, held_out = with_splits(data)
        except ConfigError as error:
            raise ConfigErrors([error]) from error
        checks.append(lambda: listed(data, paths, "data.paths"))
        if held_out:
            checks.append(lambda: listed(data, held_out, "data.validation_paths"))
    check_all(checks)


def labels_of_recordings(data: DataConfig) -> Iterator[str]:
    """Yields the class of each training recording that files name."""
    assert isinstance(data, AudioConfig)
    for entry in listed(data, with_splits(data)[0], "data.paths"):
        if not entry.fault:
            yield entry.label
