"""``data=audio_folder``: a folder with a folder of recordings for each class."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.kinds import check_recordings, labels_of_recordings, prepare_labelled_sounds

SOURCE = SpeechSource(
    name="audio_folder",
    says="folder",
    samples="labelled_sounds",
    keys=LabelledAudioConfig,
    reads=("classes",),
    reads_files=True,
    check=check_recordings,
    prepare=prepare_labelled_sounds,
    labels=labels_of_recordings,
)
