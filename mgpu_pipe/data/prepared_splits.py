"""Prepared data in one cache folder with a held-out share, or in two folders."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.data.cache import read_manifest
from mgpu_pipe.data.classes import class_number, in_order
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, evaluated_samples
from mgpu_pipe.data.text.heldout_split import held_out, held_out_groups
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PreparedSplits(Prepared):
    """Everything a worker needs to load samples from cache folders; a subclass reads them.

    A function that prepares such data makes it without counts, then adds them by :meth:`with_counts`.
    """

    folder: Path
    """Cache folder of the training data."""
    held_out_folder: Path
    """Cache folder of the held-out data; the same where a share is held out."""
    fraction: float
    """Held-out share of the folder; 1 where the training paths and the held-out paths have the same content."""
    train_samples: int = 0
    held_out_samples: int = 0
    """Held-out samples; an evaluation takes ``validation_samples`` of them."""
    validation_samples: int = 0
    bad_samples: int = 0
    digest: str = ""
    validation_digest: str = ""
    told: str = ""
    too_long_samples: int = 0
    on_too_long: str = ""
    tokenizer_folder: Path | None = None
    unigram_perplexity: float | None = None

    @abstractmethod
    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> SampleSet:
        """Opens the samples of a nonempty split.

        Args:
            seed: of the run, for random changes of training samples.
            reopen: opens them in another process.
        """

    def open(self, config: RunConfig, split: Split) -> SampleSet:
        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return self.samples(config.seed, config.model, config.data, split, partial(self.open, config, split))

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    @property
    def folders(self) -> list[Path]:
        """Cache folders of both splits, each once."""
        return list(dict.fromkeys((self.folder, self.held_out_folder)))

    @property
    def is_apart(self) -> bool:
        """Whether the held-out data has its own folder."""
        return self.held_out_folder != self.folder

    def in_split(
        self, split: Split, hashes: NDArray[np.uint64], leaders: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Which items of a split's folder belong to it, (items,), by their hashes and groups
        (:func:`held_out_groups`)."""
        if self.is_apart or self.fraction == 1:
            return np.ones(len(hashes), np.bool_)
        chosen = held_out(hashes, self.fraction) if leaders is None else held_out_groups(hashes, self.fraction, leaders)
        return chosen if split == "validation" else ~chosen

    def with_counts(self, data: DataConfig, train: int, held_out: int, reason: str = "", **facts: Any) -> Self:
        """Adds the numbers of samples and other fields; DataError, with ``reason``, if there is none to train on."""
        if not train:
            why = f": {reason}" if reason else ""
            raise DataError(f"data.source={data.source}: there is nothing to train on{why}")
        evaluated = min(held_out, data.validation_max_samples or held_out)
        counts: dict[str, Any] = {"train_samples": train, "held_out_samples": held_out, "validation_samples": evaluated}
        return replace(self, **counts, **facts)

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    def is_here(self) -> bool:
        return all(value.exists() for value in vars(self).values() if isinstance(value, Path))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        known = {name: entry for name, entry in value.items() if name != "kind"}
        paths = [field.name for field in fields(cls) if "Path" in str(field.type) and known.get(field.name) is not None]
        return cls(**{**known, **{name: Path(known[name]) for name in paths}})


def held_out_share(data: DataConfig, folder: Path, held_out_folder: Path) -> float:
    """Share of the held-out folder that is held out, as :attr:`PreparedSplits.fraction` defines it."""
    return float(held_out_folder == folder) if data.validation_paths else data.validation_fraction


def stored_names(folder: Path) -> list[str]:
    """Names of the classes or captions of a cache folder, by their numbers in its ``labels.npy``."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(manifest["labels"])


def stored_classes(folder: Path, classes: Sequence[str]) -> NDArray[np.int64]:
    """Number in ``classes`` of each sample of a cache folder, (samples,)."""
    numbers = np.array([class_number(name, classes) for name in stored_names(folder)], np.int64)
    return numbers[load_array(folder / "labels.npy")]


def store_labels(out: Path, labels: Sequence[str]) -> list[str]:
    """Writes ``labels.npy``, the number of each sample's label; returns the labels by their numbers."""
    names = sorted(set(labels), key=in_order)
    numbers = {name: number for number, name in enumerate(names)}
    save_array(out / "labels.npy", np.array([numbers[name] for name in labels], np.int64))
    return names


def note_of_several_classes(files: Path, labels: NDArray[np.int64], what: str) -> str:
    """Notice of files of one content under several classes, as tables of boxes and copies give; empty without them.

    Args:
        files: cache file of the samples' paths; none is there for data that is made.
        labels: number of each sample's class, (samples,).
        what: names the files.
    """
    hashes = load_array(files.parent / "hashes.npy")
    order = np.lexsort((labels, hashes))
    hashes, labels = hashes[order], labels[order]
    differs = (hashes[1:] == hashes[:-1]) & (labels[1:] != labels[:-1])
    if not differs.any() or not files.is_file():
        return ""
    first = json.loads(files.read_text(encoding="utf-8"))["paths"][order[1:][differs][0]]
    count = len(np.unique(hashes[1:][differs]))
    return f"{count} {what} stand under several classes, and are trained on for each of them (first: {first})"


def majority_accuracy(train: NDArray[np.int64], held_labels: NDArray[np.int64], data: DataConfig) -> float | None:
    """Accuracy on the evaluated ``held_labels``, (samples,), of always predicting the most frequent in ``train``, or
    None."""
    available = len(held_labels)
    evaluated = min(available, data.validation_max_samples or available)
    if not evaluated:
        return None
    chosen = held_labels[evaluated_samples(available, evaluated)]
    return float((chosen == np.bincount(train).argmax()).mean())
