"""Shipped sources of recordings. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource, shipped_source

Speak = Callable[[DataConfig, int, Path, Progress], tuple[Path, Path]]
"""Builds or finds the cache folders of the training and the held-out recordings, given the sampling rate."""


@dataclass(frozen=True, kw_only=True)
class SpeechSource(DataSource):
    """A shipped source of recordings.

    Attributes:
        speak: builds the cache folders of its recordings; None where files hold them.
        says: what it says of each recording: its text, its class, its classes, or nothing but the class's folder.
    """

    speak: Speak | None = None
    says: Literal["text", "class", "classes", "folder"] = "text"


def speech_source(data: DataConfig) -> SpeechSource:
    """The shipped source of recordings ``data.source``."""
    source = shipped_source(data.source)
    assert isinstance(source, SpeechSource)
    return source
