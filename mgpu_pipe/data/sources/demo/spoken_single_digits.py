"""``data=spoken_single_digits``: one digit a recording, its class, spoken by the programs espeak-ng and flite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.audio.speech_keys import LabelledAudioConfig
from mgpu_pipe.data.audio.speech_source import SpeechSource
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.sources.demo.spoken_digits import SpokenDigitsConfig, check_programs, spoken_folders


@dataclass
class SpokenLabelsConfig(SpokenDigitsConfig, LabelledAudioConfig):
    """Keys of spoken digits that are classes."""


def speak_single_digits(data: DataConfig, rate: int, cache: Path, progress: Progress) -> tuple[Path, Path]:
    return spoken_folders(data, rate, cache, progress, (1, 1))


SOURCE = SpeechSource(
    name="spoken_single_digits",
    says="class",
    samples="labelled_sounds",
    keys=SpokenLabelsConfig,
    reads=("classes",),
    check=check_programs,
    speak=speak_single_digits,
)
