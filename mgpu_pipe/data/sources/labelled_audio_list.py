"""``data=labelled_audio_list``: tables with the path of a recording and its class."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.kinds import check_recordings, labels_of_recordings, prepare_labelled_sounds

SOURCE = SpeechSource(
    name="labelled_audio_list",
    says="class",
    samples="labelled_sounds",
    keys=LabelledAudioConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    check=check_recordings,
    prepare=prepare_labelled_sounds,
    labels=labels_of_recordings,
)
