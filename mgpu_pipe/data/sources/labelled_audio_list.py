"""``data=labelled_audio_list``: tables with the path of a recording and its class."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.checks_of_sources import check_recordings, labels_of_recordings

SOURCE = SpeechSource(
    name="labelled_audio_list",
    says="class",
    samples="labelled_sounds",
    keys=LabelledAudioConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    labels=labels_of_recordings,
    check=check_recordings,
)
