"""Recordings for tests: tones of a pitch for each letter, and a list of them."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.command import four_steps

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


def list_of_tones(folder: Path, each: int = 8, column: str = "text") -> Path:
    """A CSV of recordings in ``folder``; their texts may be classes."""
    lines = [f"path,{column}"]
    for number in range(each * len(TEXTS)):
        text = TEXTS[number % len(TEXTS)]
        write_wav(folder / f"{number}.wav", tones(text, number))
        lines.append(f"{number}.wav,{text}")
    (folder / "spoken.csv").write_text("\n".join(lines) + "\n")
    return folder / "spoken.csv"


def run_speech_experiment(cache: Path, cwd: Path, name: str, model_class: str) -> Path:
    """Four steps of a shipped experiment on spoken digits, on two processes; its folder, once it is checked."""
    sizes = ("data.recordings=24", "data.validation_max_samples=6", "data.global_batch_size=4")
    folder, summary, report = four_steps(cache, cwd, name, *sizes, "data.micro_batch_size=2")
    assert summary["model"]["class"] == model_class
    assert summary["metrics"]["val/word_error_rate"] >= 0.5 and len(summary["samples"]) == 6
    assert report.count('src="data:audio/ogg;base64,T2dnU') >= 6
    return folder
