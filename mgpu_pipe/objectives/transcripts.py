"""Word and character errors of transcripts by jiwer. A transcript is a text of one character per label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mgpu_pipe.config.objective import Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.import_package import import_package

_FIRST = 0x4E00
"""Start of a Unicode block of 20,000 letters without a space."""
RATES = (
    Metric("val/word_error_rate", "held-out word error rate", percent=True, headline=True),
    Metric("val/character_error_rate", "held-out character error rate", percent=True),
)


@dataclass
class TranscriptConfig(ObjectiveConfig):
    """Keys of an objective that measures word errors."""

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        try:
            jiwer(self.name)
        except ConfigError as error:
            return [error]
        return []


def jiwer(objective: str = "ctc") -> Any:
    """The package jiwer.

    Raises:
        ConfigError: it is not installed, and ``objective`` needs it.
    """
    return import_package("jiwer", "jiwer, which counts wrong words,", "audio", "objective.name", objective)


def transcribe(labels: Iterable[int], between_words: int, blank: int | None = None) -> str:
    """Text of labels. With ``blank`` they are labels of frames: repeats are merged and blanks dropped."""
    if blank is not None:
        labels = [label for label, _ in groupby(labels) if label != blank]
    text = "".join(" " if label == between_words else chr(_FIRST + label) for label in labels)
    return " ".join(text.split())


def count_errors(pairs: Sequence[tuple[str, str]]) -> tuple[int, int, int, int]:
    """Wrong words, words, wrong characters and characters of pairs (reference, transcript)."""
    if not pairs:
        return 0, 0, 0, 0
    said, wrote = (list(texts) for texts in zip(*pairs, strict=True))
    counts = []
    for result in (jiwer().process_words(said, wrote), jiwer().process_characters(said, wrote)):
        wrong = result.substitutions + result.deletions + result.insertions
        counts += [wrong, result.hits + result.substitutions + result.deletions]
    return counts[0], counts[1], counts[2], counts[3]


def error_rates(sums: Sequence[float]) -> dict[str, float]:
    """Metrics from the sums of :func:`count_errors`."""
    wrong_words, words, wrong_characters, characters = sums
    return {"val/word_error_rate": wrong_words / words, "val/character_error_rate": wrong_characters / characters}
