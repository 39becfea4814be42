"""The most frequent class of labelled data, counted before preparation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.data_source import shipped_source
from mgpu_pipe.errors import BadInputError

COUNTED = 100_000
"""Rows that are counted, so that a check answers at once."""


@dataclass(frozen=True)
class Majority:
    """The most frequent class among ``samples`` and its count.

    Attributes:
        whole: whether these are all samples, not only the first :data:`COUNTED`.
    """

    name: str
    count: int
    samples: int
    classes: int
    whole: bool

    @property
    def share(self) -> float:
        return self.count / self.samples


def count_majority(data: DataConfig) -> Majority | None:
    """Counts the majority class; None where the source has no classes, or would have to be read as a whole."""
    source = shipped_source(data.source)
    if source is None or source.labels is None or any(path.startswith(DATA) for path in data.paths):
        return None
    try:
        classes = list(islice(source.labels(data), COUNTED + 1))
    except BadInputError:  # the checks report it, or it is left out as a bad sample
        return None
    counts = Counter(classes[:COUNTED])
    if not counts:
        return None
    (name, count) = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return Majority(name, count, counts.total(), len(counts), len(classes) <= COUNTED)
