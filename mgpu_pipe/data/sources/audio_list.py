"""``data=audio_list``: tables with the path of a recording and what is said in it."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import AudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.checks_of_sources import check_recordings

SOURCE = SpeechSource(
    name="audio_list",
    samples="speech",
    keys=AudioConfig,
    reads=("text_column", "tokenizer", "on_too_long"),
    reads_files=True,
    check=check_recordings,
)
