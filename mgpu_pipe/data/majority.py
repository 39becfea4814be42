"""The most frequent class of labelled data, counted before preparation."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_files import FOLDERS, classes_in, digits_file, label_column_of, with_splits
from mgpu_pipe.data.tables import entries_of, row_lines
from mgpu_pipe.data.text.label_rows import row_of
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
    """Counts the majority class; None where that needs reading whole archives."""
    if any(path.startswith(DATA) for path in data.paths):
        return None
    try:
        classes = list(islice(_labels(data), COUNTED + 1))
    except BadInputError:  # the checks report it, or it is left out as a bad sample
        return None
    counts = Counter(classes[:COUNTED])
    if not counts:
        return None
    (name, count) = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return Majority(name, count, counts.total(), len(counts), len(classes) <= COUNTED)


def _labels(data: DataConfig) -> Iterator[str]:
    """Class of each training sample."""
    if data.source == "digits":
        with gzip.open(digits_file(), "rt", encoding="ascii") as file:
            yield from (str(int(float(line.rpartition(",")[2]))) for line in file)
    elif data.source in FOLDERS and isinstance(data, ImageConfig):
        for root in with_splits(data)[0]:
            for name, paths in classes_in(Path(root).expanduser()).items():
                yield from [name] * len(paths)
    elif data.source == "image_list":
        for path in files.expand_paths(data.paths, "data.paths"):
            for entry in entries_of(path, data, "data.paths", "image_column", *label_column_of(data)):
                yield entry.label
    elif data.source == "labelled_jsonl":
        for path in files.expand_paths(data.paths, "data.paths"):
            yield from (row_of(data, line, origin).label for line, origin, _ in row_lines(path))
