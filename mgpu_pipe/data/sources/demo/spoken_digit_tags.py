"""``data=spoken_digit_tags``: three to five digits, whose classes they all are, spoken by espeak-ng and flite."""

from __future__ import annotations

from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.sources.demo.spoken_digits import check_programs, speak_digits
from mgpu_pipe.data.sources.demo.spoken_single_digits import SpokenLabelsConfig

SOURCE = SpeechSource(
    name="spoken_digit_tags",
    says="classes",
    samples="tagged_sounds",
    keys=SpokenLabelsConfig,
    reads=("classes",),
    check=check_programs,
    speak=speak_digits,
)
