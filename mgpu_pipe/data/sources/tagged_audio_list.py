"""``data=tagged_audio_list``: tables with the path of a recording and its classes, several or none."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.checks_of_sources import check_recordings

SOURCE = SpeechSource(
    name="tagged_audio_list",
    says="classes",
    samples="tagged_sounds",
    keys=LabelledAudioConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    check=check_recordings,
)
