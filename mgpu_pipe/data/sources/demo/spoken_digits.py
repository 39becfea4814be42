"""``data=spoken_digits``: three to five digits, spoken by espeak-ng and flite."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_keys import SpokenDigitsConfig
from mgpu_pipe.data.kinds import check_recordings, prepare_speech
from mgpu_pipe.data.source import DataSource

SOURCE = DataSource(
    name="spoken_digits",
    samples="speech",
    keys=SpokenDigitsConfig,
    reads=("tokenizer", "on_too_long"),
    check=check_recordings,
    prepare=prepare_speech,
)
