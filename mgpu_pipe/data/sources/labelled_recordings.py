"""Recordings with their text, caption, class or classes, in tables of paths or in a folder for each class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.speech_source import AudioConfig, CaptionedAudioConfig, LabelledAudioConfig, SpeechSource


def check_recordings(model: ModelConfig, data: DataConfig) -> None:
    """Checks packages, programs, lists, and that the model takes such recordings; ConfigErrors has all errors."""
    from mgpu_pipe.data.audio import listen

    listen.check_recordings(model, data)


def labels_of_recordings(data: DataConfig) -> Iterator[str]:
    """Yields the class of each training recording that files name."""
    from mgpu_pipe.data.audio import listen

    assert isinstance(data, AudioConfig)
    for entry in listen.list_recordings(data, listen.with_splits(data)[0], "data.paths"):
        if not entry.fault:
            yield entry.label


recordings = partial(SpeechSource, check=check_recordings)
labelled = partial(recordings, samples="labelled_sounds", keys=LabelledAudioConfig, labels=labels_of_recordings)
SOURCES = (
    recordings(name="audio_list", reads=("text_column", "tokenizer", "on_too_long")),
    labelled(name="audio_folder", says="folder", reads=("classes",)),
    labelled(name="labelled_audio_list", says="class", reads=("classes", "label_column")),
    recordings(
        name="tagged_audio_list",
        says="classes",
        samples="tagged_sounds",
        keys=LabelledAudioConfig,
        reads=("classes", "label_column"),
    ),
    recordings(
        name="captioned_audio_list",
        says="caption",
        samples="captioned_sounds",
        keys=CaptionedAudioConfig,
        reads=TEXT_KEYS,
    ),
)
