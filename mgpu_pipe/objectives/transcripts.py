"""Transcripts as texts of one character a label, and how many words and characters of them are wrong, by jiwer.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mgpu_pipe.config.objective import Metric
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import ConfigError

_FIRST = 0x4E00
"""A block of 20,000 letters, none of which is a space."""
RATES = (
    Metric("val/word_error_rate", "held-out word error rate", percent=True, headline=True),
    Metric("val/character_error_rate", "held-out character error rate", percent=True),
)


@dataclass
class TranscriptConfig(ObjectiveConfig):
    """The keys of an objective whose transcripts are compared with what was said."""

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
    try:
        import jiwer as package
    except ImportError as error:
        fix = "install it: pip install 'mgpu_pipe[audio]'"
        raise ConfigError(
            "objective.name", objective, fix, "jiwer, which counts wrong words, is not installed"
        ) from error
    return package


def spoken(labels: Iterable[int], between_words: int, blank: int | None = None) -> str:
    """What labels say; with ``blank``, labels of frames, of which equal ones that follow one another are one."""
    if blank is not None:
        labels = [label for label, _ in groupby(labels) if label != blank]
    text = "".join(" " if label == between_words else chr(_FIRST + label) for label in labels)
    return " ".join(text.split())


def errors(pairs: Sequence[tuple[str, str]]) -> tuple[int, int, int, int]:
    """Of transcripts, what was said first, what was heard second: wrong words, words, wrong characters, characters."""
    if not pairs:
        return 0, 0, 0, 0
    said, heard = (list(texts) for texts in zip(*pairs, strict=True))
    found = []
    for one in (jiwer().process_words(said, heard), jiwer().process_characters(said, heard)):
        found += [one.substitutions + one.deletions + one.insertions, one.hits + one.substitutions + one.deletions]
    return found[0], found[1], found[2], found[3]


def rates(sums: Sequence[float]) -> dict[str, float]:
    """From sums of :func:`errors`."""
    wrong_words, words, wrong_characters, characters = sums
    return {"val/word_error_rate": wrong_words / words, "val/character_error_rate": wrong_characters / characters}
