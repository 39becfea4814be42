"""``data=tagged_audio_list``: tables with the path of a recording and its classes, several or none."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.kinds import check_recordings, prepare_tagged_sounds

SOURCE = SpeechSource(
    name="tagged_audio_list",
    says="classes",
    samples="tagged_sounds",
    keys=LabelledAudioConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    check=check_recordings,
    prepare=prepare_tagged_sounds,
)
