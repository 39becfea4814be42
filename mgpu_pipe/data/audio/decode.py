"""Bytes of a sound file to one channel of the wanted rate. Needs soundfile; no torch."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.errors import ConfigError

Wave = NDArray[np.float32]
LEAST_SECONDS = 0.025
"""Of what can hold a word; a frame of most models."""
_STREAMED = 0xFFFFFFFF
"""The size in the head of a WAV file that was written without knowing it."""


class BadAudioError(Exception):
    """A recording that cannot be used, and why."""


def soundfile() -> Any:
    """The package soundfile.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import soundfile as package
    except (ImportError, OSError) as error:  # OSError: without the library that it brings
        fix = "install it: pip install 'mgpu_pipe[audio]'"
        raise ConfigError("data.source", "recordings", fix, "soundfile is not installed") from error
    return package


def decode(raw: bytes, rate: int, max_seconds: float) -> Wave:
    """The recording in a file's bytes: the mean of its channels at ``rate`` samples a second, shape (samples,).

    Raises:
        BadAudioError: it cannot be read whole, is empty or too long, or holds values that are no numbers.
    """
    package = soundfile()
    try:
        with package.SoundFile(io.BytesIO(raw)) as file:
            seconds, frames = file.frames / file.samplerate, file.frames
            if seconds > max_seconds:
                raise BadAudioError(f"lasts {seconds:.1f} s, longer than data.max_seconds={max_seconds:g}")
            # As integers these are read in a third of the time; a float32 holds each of them.
            whole = file.subtype == "PCM_16"
            channels, before = file.read(dtype="int16" if whole else "float32", always_2d=True), int(file.samplerate)
    except (package.LibsndfileError, RuntimeError) as error:
        raise BadAudioError(f"is no sound that can be read ({' '.join(str(error).split())[:100]})") from error
    stated = int.from_bytes(raw[4:8], "little")
    if len(channels) < frames or (raw[:4] == b"RIFF" and stated != _STREAMED and stated + 8 > len(raw) + 1):
        raise BadAudioError("is cut short")
    if len(channels) < LEAST_SECONDS * before:
        raise BadAudioError(f"holds {len(channels)} samples: there is nothing to hear")
    if whole:
        channels = channels * np.float32(1 / 32768)
    elif not np.isfinite(channels).all():
        raise BadAudioError("has values that are no numbers")
    one = channels[:, 0] if channels.shape[1] == 1 else channels.mean(1, dtype=np.float32)
    return resampled(one, rate / before)


def resampled(wave: Wave, factor: float) -> Wave:
    """``wave`` with ``factor`` times as many samples: what lies above the lower rate's limit is left out, the rest is
    kept as it is (by the discrete Fourier transform, whose ends meet)."""
    length = max(1, round(len(wave) * factor))
    if length == len(wave):
        return wave
    spectrum, wanted = np.fft.rfft(wave), np.zeros(length // 2 + 1, np.complex64)
    kept = min(len(spectrum), len(wanted))
    wanted[:kept] = spectrum[:kept]
    return (np.fft.irfft(wanted, length) * (length / len(wave))).astype(np.float32)
