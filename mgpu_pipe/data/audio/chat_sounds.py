"""Recordings of conversations: scanned once, read as spectrograms of the model's window."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.find import families_with, recordings_of
from mgpu_pipe.config.schema import Auto, ModelConfig
from mgpu_pipe.data.audio.decode_audio import Wave
from mgpu_pipe.data.audio.listen import FILES, WAVES, listen_to, read_recording, stored_wave, transcripts
from mgpu_pipe.data.audio.log_mel import FrameMel, LogMel
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.file_lists import Entry
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.text.token_store import load_array
from mgpu_pipe.errors import ConfigError

LONGEST = 3600.0
"""Seconds of the longest recording that is scanned; a model's window is shorter."""


def chat_window(model: ModelConfig) -> LogMel | None:
    """Window of the spectrograms that ``model`` hears in conversations, or None; errors: see
    :meth:`LogMel.from_tower`."""
    recordings = _recordings_of(model)
    return (FrameMel if recordings == "frames" else LogMel).from_tower(model) if recordings else None


def _recordings_of(model: ModelConfig) -> str:
    kind = str(model.type or model_field(model, "model_type"))
    return recordings_of(kind, model_field(model, "audio_config"))


def hears_sounds(model: ModelConfig, origin: str) -> None:
    """Raises ConfigError where the model takes no recordings."""
    if not _recordings_of(model):
        kind = str(model.type or model_field(model, "model_type"))
        hearing = families_with(lambda family: family.recordings)
        reason = f"{origin} has a recording, and models of {kind} take none"
        raise ConfigError("model.type", kind, f"use one of {', '.join(hearing)}", reason)


def prepare_sounds(
    entries: Sequence[Entry], window: LogMel, tokenize_workers: int | Auto, cache: Path, progress: Progress
) -> Path:
    """Builds or finds the cache folder of recordings; see :func:`mgpu_pipe.data.audio.listen.listen_to`."""
    once = {entry.path: entry for entry in reversed(entries)}
    return listen_to(list(reversed(once.values())), window.rate, LONGEST, tokenize_workers, cache, progress)


def unfit_sounds(folder: Path, window: LogMel) -> list[tuple[str, str]]:
    """Recordings of a cache folder that do not fit the window, and why."""
    paths, lengths = _paths(folder), load_array(folder / "lengths.npy").tolist()
    faults = ((path, window.chat_fault(length)) for path, length in zip(paths, lengths, strict=True))
    return [(path, fault) for path, fault in faults if fault]


def tokens_of_sounds(folder: Path, window: LogMel) -> NDArray[np.int64]:
    """Tokens of each recording of a cache folder; 0 for one that does not fit the window."""
    lengths = load_array(folder / "lengths.npy")
    fits = np.array([not window.chat_fault(length) for length in lengths.tolist()], np.bool_)
    tokens: NDArray[np.int64] = np.where(fits, window.num_tokens(window.num_frames(lengths)), 0)
    return tokens


class StoredSounds:
    """Recordings of a cache folder."""

    def __init__(self, folder: Path, window: LogMel) -> None:
        self._window, self._waves, self._files = window, None, dict[str, Any]()
        if (folder / WAVES).is_file():
            self._waves = load_array(folder / WAVES)
            self._borders = np.concatenate([[0], np.cumsum(load_array(folder / "lengths.npy"))])
        else:
            self._files = json.loads((folder / FILES).read_text(encoding="utf-8"))

    def spectrograms(self, places: Sequence[int]) -> tuple[list[int], list[NDArray[np.float32]]]:
        """Frames of these recordings without the silence after them, and their spectrograms, (bands, frames)."""
        frames, values = list[int](), list[NDArray[np.float32]]()
        for place in places:
            wave = self._wave(place)
            frames.append(self._window.num_frames(len(wave)))
            values.append(self._window.spectrogram(wave))
        return frames, values

    def _wave(self, place: int) -> Wave:
        if self._waves is not None:
            return stored_wave(self._waves, self._borders, place)
        known = Fingerprint(self._files["sizes"][place], tuple(self._files["blocks"][place]))
        return read_recording(Path(self._files["paths"][place]), known, self._window.rate, LONGEST)


def _paths(folder: Path) -> list[str]:
    if not (folder / FILES).is_file():
        return transcripts(folder)[1]
    paths: list[str] = json.loads((folder / FILES).read_text(encoding="utf-8"))["paths"]
    return paths
