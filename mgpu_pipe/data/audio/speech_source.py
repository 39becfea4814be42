"""Shipped sources of recordings. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource, shipped_source

Speak = Callable[[DataConfig, int, Path, Progress], tuple[Path, Path]]
"""Builds or finds the cache folders of the training and the held-out recordings, given the sampling rate."""


@dataclass(frozen=True, kw_only=True)
class SpeechSource(DataSource):
    """A shipped source of recordings; ``speak`` is None where files hold them."""

    speak: Speak | None = None


def speaker_of(data: DataConfig) -> Speak | None:
    """Function that speaks the recordings of ``data.source``; None where files hold them."""
    source = shipped_source(data.source)
    assert isinstance(source, SpeechSource)
    return source.speak
