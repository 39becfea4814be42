"""Classes of labelled data: names, numbers, and the most frequent one."""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.data_source import shipped_source
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.parquet_rows import class_names_of, is_columnar
from mgpu_pipe.errors import BadInputError, ConfigError, DataError
from mgpu_pipe.system.local_files import shorten

COLUMNAR = (".parquet", ".arrow")
MOST_DIGITS = sys.int_info.default_max_str_digits
"""Digits of a number; a longer name counts as a word."""


def class_names(
    model: ModelConfig, data: DataConfig, trained: Collection[str], evaluated: Collection[str] = ()
) -> list[str]:
    """``data.classes``, else the trained classifier's, else those that a file of the datasets library lists, else the
    data's; ConfigError for unlisted, too few, other than its labels, or of ``evaluated`` samples alone."""
    names, key, there = list(data.classes), "data.classes", {*trained, *evaluated}
    if not names:
        names, key = _names_in_model(model), "model.config.id2label"
    if not names:
        names, key = _names_in_files(data), "data.label_column"
    if not names:
        names, key = sorted(there, key=in_order), "data.label_column"
        if unknown := sorted(there.difference(trained)):
            reason = f"no training sample has the class {shorten(unknown[0])!r}"
            fix = "give training samples of it, or name all classes by data.classes"
            raise ConfigError("data.validation_paths", data.validation_paths, fix, reason)
    strange = sorted((name for name in there if class_number(name, names) is None), key=in_order)
    if strange:
        reason = f"the data also has a class {shorten(strange[0])!r}"
        raise ConfigError(
            key, ",".join(names), "name every class by data.classes, in the order of their numbers", reason
        )
    alike = {unicodedata.normalize("NFC", name).strip(): name for name in names}
    if key == "data.label_column" and (twins := [name for name in names if name not in alike.values()]):
        reason = f"the data has two classes that look like {twins[0].strip()!r}: spaces or the forms of letters differ"
        raise ConfigError(key, data.label_column, "write both alike, or name each class by data.classes", reason)
    if key == "data.label_column" and len(names) < 2:
        fix = "give samples of two classes or more, or name the classes by data.classes"
        raise ConfigError(key, data.label_column, fix, f"every sample has the class {', '.join(names)!r}")
    if len(names) < 2 or len(set(names)) < len(names):
        reason = "there are fewer than two classes, or one is named twice"
        raise ConfigError(key, ",".join(names), "name each class once by data.classes", reason)
    wanted = model.config.get("num_labels")
    if wanted is not None and wanted != len(names):
        reason = f"the data has {len(names)} classes"
        raise ConfigError("model.config.num_labels", wanted, "leave it out", reason)
    return names


def classes_in_digest(
    model: ModelConfig, data: DataConfig, classes: Sequence[str], there: Collection[str]
) -> list[str]:
    """``classes`` in the digest of the data: their numbers where a file names all numbers in the data, as earlier
    versions did without these names."""
    numbers = [str(number) for number in range(len(classes))]
    named = bool(data.classes or _names_in_model(model))
    return numbers if set(there) == set(numbers) and not named else list(classes)


def class_fields(classes: Sequence[str]) -> dict[str, Any]:
    """Fields of the model's configuration with the classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


def class_number(name: str, classes: Sequence[str]) -> int | None:
    """Number of a class, given by its name or by the number itself."""
    if name in classes:
        return classes.index(name)
    return int(name) if _is_number(name) and int(name) < len(classes) else None


def _names_in_model(model: ModelConfig) -> list[str]:
    """Class names in the model's configuration; empty where it only numbers them."""
    id2label = model_field(model, "id2label")
    if not isinstance(id2label, Mapping):
        return []
    names = [str(name) for _, name in sorted(id2label.items(), key=lambda entry: int(entry[0]))]
    return [] if names == [f"LABEL_{number}" for number in range(len(names))] else names


def _names_in_files(data: DataConfig) -> list[str]:
    """Class names that the first readable Parquet or Arrow file of ``data.paths`` lists; empty without any."""
    paths = [path for path in data.paths if Path(path).suffix.lower() in COLUMNAR and not path.startswith(DATA)]
    for file in files.expand_paths(paths, "data.paths") if paths else ():
        try:
            if is_columnar(file):
                return class_names_of(file, data.label_column)
        except DataError:
            continue  # reading its rows refuses it, or leaves it out
    return []


def in_order(name: str) -> tuple[bool, int, str]:
    """Sort key: numbers by value, before words."""
    is_number = _is_number(name.removeprefix("-"))
    return not is_number, int(name) if is_number else 0, name


def _is_number(name: str) -> bool:
    """Whether a class is a number without a sign; Python reads no longer ones."""
    return name.isascii() and name.isdigit() and len(name) <= MOST_DIGITS


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
