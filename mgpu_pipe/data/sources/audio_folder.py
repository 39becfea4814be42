"""``data=audio_folder``: a folder with a folder of recordings for each class."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.checks_of_sources import check_recordings, labels_of_recordings

SOURCE = SpeechSource(
    name="audio_folder",
    says="folder",
    samples="labelled_sounds",
    keys=LabelledAudioConfig,
    reads=("classes",),
    reads_files=True,
    labels=labels_of_recordings,
    check=check_recordings,
)
