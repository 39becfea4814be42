"""Shipped sources of recordings, and their keys. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.config.schema import Auto, DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource, shipped_source


@dataclass
class AudioConfig(DataConfig):
    audio_column: str = "path"
    """Name of the field with a recording's path, seen from its list's folder (audio_list)."""
    sampling_rate: int | Auto = field(default="auto", metadata={"at_least": 1000})
    """Samples a second that the model gets; recordings of another rate are resampled. auto is what the model's folder
    says, else 16,000."""
    max_seconds: float = field(default=30.0, metadata={"above": 0})
    """A longer recording cannot be used."""
    speed: float = field(default=0.0, metadata={"at_least": 0, "at_most": 0.5})
    """Share by which a training recording is played faster or slower at most, pitch and all; this and the next one are
    drawn by seed and sample alone, so they are the same on any number of processes."""
    noise: float = field(default=0.0, metadata={"at_least": 0})
    """Largest root mean square of the white noise added to a training recording, relative to the recording's."""
    sort_steps: int = field(default=1, metadata={"at_least": 1})
    """Steps whose samples are sorted by length together, and which then come in an order drawn by the seed: a step's
    samples are about as long as one another, so that little of it is padding. 1 sorts none."""

    def sample_text(self) -> str:
        return f"recordings of at most {self.max_seconds:g} s"

    def tokens(self) -> int:
        return 0


@dataclass
class LabelledAudioConfig(AudioConfig):
    segment_seconds: float | None = field(default=None, metadata={"above": 0})
    """Longest part of a recording that the model gets: of a longer one a part of this length, drawn by seed and sample
    in training, its middle in an evaluation. null takes recordings whole."""


@dataclass
class CaptionedAudioConfig(AudioConfig):
    caption_column: str = "caption"
    """Name of the field with a recording's caption or list of captions."""

    def sample_text(self) -> str:
        return f"{super().sample_text()} with captions of {self.seq_len} tokens"


Speak = Callable[[DataConfig, int, Path, Progress], tuple[Path, Path]]
"""Builds or finds the cache folders of the training and the held-out recordings, given the sampling rate."""


@dataclass(frozen=True, kw_only=True)
class SpeechSource(DataSource):
    """A shipped source of recordings.

    Attributes:
        speak: builds the cache folders of its recordings; None where files hold them.
        says: label of a recording: its text, its caption, its class, its classes, or the name of its folder.
    """

    samples: str = "speech"
    keys: type[Any] | None = AudioConfig
    reads_files: bool = True
    speak: Speak | None = None
    says: Literal["text", "caption", "class", "classes", "folder"] = "text"


def speech_source(data: DataConfig) -> SpeechSource:
    """The shipped source of recordings ``data.source``."""
    source = shipped_source(data.source)
    assert isinstance(source, SpeechSource)
    return source
