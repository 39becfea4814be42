"""Prepares pictures with a class: training and held-out pictures, and their classes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.arrays import ArraySamples
from mgpu_pipe.data.bad_samples import report_bad_samples
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, read_manifest, run_cache
from mgpu_pipe.data.classes import class_fields, class_names, classes_in_digest
from mgpu_pipe.data.images.image_keys import ImageConfig, layout_of
from mgpu_pipe.data.images.picture_files import CLASS_FOLDERS, FILES, entries, label_column_of, tar_entries, with_splits
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.scan_images import LabelledImages, prepare_digits, prepare_files
from mgpu_pipe.data.prepared_splits import PreparedSplits, majority_accuracy, note_of_several_classes, stored_classes
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.tables import keep_in
from mgpu_pipe.data.text.token_store import load_array

Images = TypeVar("Images", bound="PreparedImages")
_log = logging.getLogger(__name__)
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparedImages(PreparedSplits):
    """Everything a worker needs to load pictures with a class; :func:`prepare_images` makes it."""

    kind: ClassVar[str] = "labelled_images"

    classes: list[str]
    """Class names in the order of their numbers."""
    num_pictures: int
    majority_accuracy: float | None = None
    """Accuracy of always predicting the most frequent training class, on the evaluated samples."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> ArraySamples:
        return ArraySamples(seed, data.source, LabelledImages(model, data, split, self), reopen)

    def pictures(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's pictures in its folder."""
        return np.flatnonzero(self.in_split(split, load_array(self.folder_of(split) / "hashes.npy")))

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Class of each sample of a split, in the order of :meth:`pictures`."""
        return stored_classes(self.folder_of(split), self.classes)[self.pictures(split)]

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_pictures, "pictures"), (len(self.classes), "classes"), *self.left_out()]

    def context(self, data: DataConfig) -> float:
        return 0.0

    def model_fields(self) -> dict[str, Any]:
        return class_fields(self.classes)


def prepare_images(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedImages:
    """Prepares the pictures of ``data``, or finds them in the cache.

    Raises:
        ConfigError: a path, list of classes or size that cannot work; a package that is missing.
        DataError: a list that is broken; a picture that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
    """
    scan = scan_images(model, data, progress)
    trained, evaluated = (set(scan.manifests[place]["labels"]) for place in (0, -1))
    known = PreparedImages(**scan.fields(), classes=class_names(model, data, trained, evaluated))
    classes = classes_in_digest(model, data, known.classes, trained | evaluated)
    numbers = load_array(known.folder / "labels.npy")
    known = replace(known, told=note_of_several_classes(known.folder / FILES, numbers, "pictures"))
    return add_figures(known, data, (classes, scan.seen), scan)


@dataclass(frozen=True)
class ImageScan:
    """Result of :func:`scan_images`.

    Attributes:
        folder, held_out_folder: in the cache, see :mod:`mgpu_pipe.data.images.scan_images`.
        fraction: held-out share, see :class:`~mgpu_pipe.data.prepared_splits.PreparedSplits`.
        seen: every setting that changes the model's input.
    """

    folder: Path
    held_out_folder: Path
    fraction: float
    manifests: list[dict[str, Any]]
    seen: tuple[object, ...]

    def fields(self) -> dict[str, Any]:
        """Constructor fields of a prepared data set that the scan decides."""
        return {
            "folder": self.folder,
            "held_out_folder": self.held_out_folder,
            "fraction": self.fraction,
            "num_pictures": sum(manifest["pictures"] for manifest in self.manifests),
            "bad_samples": sum(len(manifest["bad"]) for manifest in self.manifests),
        }


def scan_images(model: ModelConfig, data: DataConfig, progress: Progress | None) -> ImageScan:
    """Scans the pictures of ``data``, or finds the scan in the cache; raises like :func:`prepare_images`."""
    assert isinstance(data, ImageConfig)
    pixels = Pixels.from_config(data, model)
    report = progress or no_progress
    with run_cache(data) as cache:
        paths, held_out = with_splits(data)
        folder = held_folder = _prepare(data, paths, "data.paths", pixels.channels, cache, report)
        if held_out:
            held_folder = _prepare(data, held_out, "data.validation_paths", pixels.channels, cache, report)
    for note in CLASS_FOLDERS.notes(data) if layout_of(data) == "folder" else ():
        _log.warning("%s", note)
    manifests = [read_manifest(known) or {} for known in dict.fromkeys((folder, held_folder))]
    report_bad_samples(
        [(path, reason) for manifest in manifests for path, reason in manifest["bad"]], data.on_bad_sample
    )
    return ImageScan(
        folder,
        held_folder,
        float(held_folder == folder) if held_out else data.validation_fraction,
        manifests,
        (pixels.identity(), *data.changes()),
    )


def add_figures(known: Images, data: DataConfig, seen: tuple[object, ...], scan: ImageScan) -> Images:
    """Adds sample counts, the majority accuracy and digests to ``known``."""
    content = [manifest["content"] for manifest in scan.manifests]
    train, held_labels = known.labels("train"), known.labels("validation")
    identity = (_FORMAT, *seen)
    apart = known.is_apart and len(held_labels)
    return known.with_counts(
        data,
        len(train),
        len(held_labels),
        majority_accuracy=majority_accuracy(train, held_labels, data),
        digest=digest_of(content[0], known.fraction, *identity),
        validation_digest=digest_of(content[-1], *identity) if apart else "",
    )


def _prepare(data: ImageConfig, patterns: list[str], key: str, channels: int, cache: Path, progress: Progress) -> Path:
    """Builds or finds the cache folder of the pictures that ``patterns`` name."""
    layout = layout_of(data)
    if layout == "digits":
        return prepare_digits(cache)
    if layout == "tar":
        listed = tar_entries(data, patterns, key, label_column_of(data), cache, progress)
    else:
        listed = entries(data, patterns, key, keep_in(cache))
    return prepare_files(data, listed, channels, cache, progress)
