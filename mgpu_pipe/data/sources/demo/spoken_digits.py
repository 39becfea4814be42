"""Digits spoken by the programs espeak-ng and flite: three to five in a recording, or a single digit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.speech_source import AudioConfig, LabelledAudioConfig, SpeechSource
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.sources.labelled_recordings import check_recordings
from mgpu_pipe.errors import check_all


@dataclass
class SpokenDigitsConfig(AudioConfig):
    recordings: int = field(default=2400, metadata={"at_least": 1})
    """Number of training recordings (spoken_digits)."""
    held_out: Literal["voices", "synthesiser"] = "voices"
    """Held-out voices: voices of espeak-ng that are not trained on, or flite, another synthesiser."""


@dataclass
class SpokenLabelsConfig(SpokenDigitsConfig, LabelledAudioConfig):
    """Keys of spoken digits that are classes."""


def check_programs(model: ModelConfig, data: DataConfig) -> None:
    """Checks recordings in general, and that the programs that speak are installed."""
    from mgpu_pipe.data.audio import synthesis

    assert isinstance(data, SpokenDigitsConfig)
    programs = [synthesis.ESPEAK, *((synthesis.FLITE,) if data.held_out == "synthesiser" else ())]
    check_all([lambda: check_recordings(model, data), *(partial(synthesis.program, program) for program in programs)])


def speak_digits(data: DataConfig, rate: int, cache: Path, progress: Progress) -> tuple[Path, Path]:
    from mgpu_pipe.data.audio.synthesis import DIGITS

    return spoken_folders(data, rate, cache, progress, DIGITS)


def speak_single_digits(data: DataConfig, rate: int, cache: Path, progress: Progress) -> tuple[Path, Path]:
    return spoken_folders(data, rate, cache, progress, (1, 1))


def spoken_folders(
    data: DataConfig, rate: int, cache: Path, progress: Progress, digits: tuple[int, int]
) -> tuple[Path, Path]:
    """Builds or finds the cache folders of the training and the held-out recordings.

    Args:
        digits: fewest and most of a recording.
    """
    from mgpu_pipe.data.audio import synthesis
    from mgpu_pipe.data.audio.listen import keep_spoken

    assert isinstance(data, SpokenDigitsConfig)
    counts = {
        "heard": data.recordings,
        "voices": min(synthesis.UNHEARD_RECORDINGS, data.recordings),
        "synthesiser": min(synthesis.FLITE_RECORDINGS, data.recordings),
    }
    kinds: tuple[str, ...] = ("heard", data.held_out)
    trained, held_out = (keep_spoken(kind, counts[kind], rate, cache, progress, digits) for kind in kinds)
    return trained, held_out


spoken = partial(SpeechSource, reads_files=False, check=check_programs)
SOURCES = (
    spoken(name="spoken_digits", keys=SpokenDigitsConfig, reads=("tokenizer", "on_too_long"), speak=speak_digits),
    spoken(
        name="spoken_single_digits",
        says="class",
        samples="labelled_sounds",
        keys=SpokenLabelsConfig,
        reads=("classes",),
        speak=speak_single_digits,
    ),
    spoken(
        name="spoken_digit_tags",
        says="classes",
        samples="tagged_sounds",
        keys=SpokenLabelsConfig,
        reads=("classes",),
        speak=speak_digits,
    ),
)
