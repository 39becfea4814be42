"""Recordings for tests: tones of a pitch for each letter, and a list of them."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RATE = 8000
TEXTS = ("ab", "ba", "a b", "b ab", "aab")


def tones(text: str, seed: int, rate: int = RATE) -> NDArray[np.float32]:
    """A fifth of a second for each character."""
    random, seconds = np.random.default_rng(seed), np.arange(rate // 5) / rate
    pitch = {" ": 0.0, "a": 400.0, "b": 900.0}
    parts = [np.sin(2 * np.pi * pitch.get(one, 600.0) * seconds) for one in text]
    return np.concatenate(parts).astype(np.float32) * 0.3 + 0.01 * random.standard_normal(
        len(text) * (rate // 5), np.float32
    )


def write_wav(path: Path, values: NDArray[np.float32], rate: int = RATE, channels: int = 1) -> None:
    """16 bits; ``values`` hold the channels one beside the other."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(values, -1, 1) * 32767).astype("<i2").tobytes())


def list_of_tones(folder: Path, each: int = 8) -> Path:
    """A CSV of recordings in ``folder``."""
    lines = ["path,text"]
    for number in range(each * len(TEXTS)):
        text = TEXTS[number % len(TEXTS)]
        write_wav(folder / f"{number}.wav", tones(text, number))
        lines.append(f"{number}.wav,{text}")
    (folder / "spoken.csv").write_text("\n".join(lines) + "\n")
    return folder / "spoken.csv"
