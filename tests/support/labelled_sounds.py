"""Recordings with a class for tests: tones of a pitch for each class, in folders or a list."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.sounds import RATE, tones, write_wav

CLASSES = {"high": "b", "low": "a", "mixed": "ab"}
"""Letters of :func:`tones` by class."""


def folder_of_sounds(root: Path, each: int = 10, first: int = 0) -> Path:
    """A folder for each class below ``root``, with recordings of uneven lengths."""
    for place, (name, letters) in enumerate(CLASSES.items()):
        (root / name).mkdir(parents=True)
        for number in range(first, first + each):
            wave = tones(letters * (1 + number % 2), 100 * place + number)
            write_wav(root / name / f"{number}.wav", wave[: len(wave) - 80 * (number % 5)])
    return root


def list_of_classes(root: Path) -> Path:
    """A CSV beside the folders of :func:`folder_of_sounds`."""
    rows = [f"{path.relative_to(root)},{path.parent.name}" for path in sorted(root.rglob("*.wav"))]
    (root / "sounds.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return root / "sounds.csv"


def heard(path: Path) -> np.ndarray:
    """Samples of a file of these."""
    import soundfile

    wave, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE
    return np.asarray(wave)
