"""Prepares pictures with a class: training and held-out pictures, and their classes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.bad_samples import NAMED, report_bad_samples
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.classes import class_names, class_number
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_files import entries, label_column_of, loose_pictures, with_splits
from mgpu_pipe.data.images.picture_source import layout_of
from mgpu_pipe.data.images.picture_tars import tar_entries
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.scan_images import prepare_digits, prepare_files
from mgpu_pipe.data.samples import Prepared, Split, evaluated_samples
from mgpu_pipe.data.tables import kept_in
from mgpu_pipe.data.text.heldout_split import held_out
from mgpu_pipe.data.text.token_store import load_array
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.array_samples import ArraySamples

Images = TypeVar("Images", bound="PreparedImages")
_log = logging.getLogger(__name__)
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparedImages(Prepared):
    """Everything a worker needs to load pictures with a class; :func:`prepare_images` makes it."""

    kind: ClassVar[str] = "labelled_images"
    places: ClassVar[tuple[str, ...]] = ("folder", "held_out_folder")
    """The fields that are paths."""

    folder: Path
    """Cache folder of the training pictures."""
    held_out_folder: Path
    """Cache folder of the held-out pictures; the same where a share is held out."""
    fraction: float
    """Held-out share; 1 means all of the held-out folder, which is then also the training folder."""
    classes: list[str]
    """Class names in the order of their numbers."""
    num_pictures: int
    bad_samples: int
    """Pictures left out."""
    train_samples: int
    held_out_samples: int
    """Held-out samples; an evaluation takes ``validation_samples`` of them."""
    validation_samples: int
    majority_accuracy: float | None
    """Accuracy of always predicting the most frequent training class, on the evaluated samples."""
    digest: str
    validation_digest: str
    tokenizer_folder: Path | None = None
    unigram_perplexity: float | None = None

    def open(self, config: RunConfig, split: Split) -> ArraySamples:
        from mgpu_pipe.data.array_samples import ArraySamples
        from mgpu_pipe.data.images.scan_images import LabelledImages

        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return ArraySamples(config, LabelledImages(config, split, self), partial(self.open, config, split))

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    def pictures(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's pictures in its folder."""
        hashes = load_array(self.folder_of(split) / "hashes.npy")
        if self.held_out_folder != self.folder or self.fraction == 1:
            return np.arange(len(hashes))
        chosen = held_out(hashes, self.fraction)
        return np.flatnonzero(chosen if split == "validation" else ~chosen)

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Class of each sample of a split, in the order of :meth:`pictures`."""
        folder = self.folder_of(split)
        numbers = np.array([class_number(name, self.classes) for name in _names(folder)], np.int64)
        return numbers[load_array(folder / "labels.npy")[self.pictures(split)]]

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    def is_here(self) -> bool:
        return self.folder.exists() and self.held_out_folder.exists()

    def amounts(self) -> list[tuple[int, str]]:
        left_out = [(self.bad_samples, "left out")] if self.bad_samples else []
        return [(self.num_pictures, "pictures"), (len(self.classes), "classes"), *left_out]

    def context(self, config: RunConfig) -> float:
        return 0.0

    def model_fields(self) -> dict[str, Any]:
        return {
            "id2label": {str(number): name for number, name in enumerate(self.classes)},
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }

    def as_dict(self) -> dict[str, Any]:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        return cls(**{**fields, **{name: Path(fields[name]) for name in cls.places}})


def prepare_images(config: RunConfig, progress: Progress | None = None) -> PreparedImages:
    """Prepares the pictures of ``config``, or finds them in the cache.

    Raises:
        ConfigError: a path, list of classes or size that cannot work; a package that is missing.
        DataError: a list that is broken; a picture that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
    """
    scan = scan_images(config, progress)
    known = PreparedImages(
        **scan.fields(config),
        classes=class_names(config, {name for manifest in scan.manifests for name in manifest["labels"]}),
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        majority_accuracy=None,
        digest="",
        validation_digest="",
    )
    return add_figures(known, config, (known.classes, scan.seen), scan)


@dataclass(frozen=True)
class ImageScan:
    """Result of :func:`scan_images`.

    Attributes:
        folder, held_out_folder: in the cache, see :mod:`mgpu_pipe.data.images.scan_images`.
        separate: the held-out pictures have their own paths, and are not a share of the others.
        seen: every setting that changes the model's input.
    """

    folder: Path
    held_out_folder: Path
    separate: bool
    manifests: list[dict[str, Any]]
    seen: tuple[object, ...]

    def fields(self, config: RunConfig) -> dict[str, Any]:
        """Constructor fields of a prepared data set that the scan decides."""
        return {
            "folder": self.folder,
            "held_out_folder": self.held_out_folder,
            "fraction": float(self.held_out_folder == self.folder)
            if self.separate
            else config.data.validation_fraction,
            "num_pictures": sum(manifest["pictures"] for manifest in self.manifests),
            "bad_samples": sum(len(manifest["bad"]) for manifest in self.manifests),
        }


def scan_images(config: RunConfig, progress: Progress | None) -> ImageScan:
    """Scans the pictures of ``config``, or finds the scan in the cache; raises like :func:`prepare_images`."""
    data = config.data
    assert isinstance(data, ImageConfig)
    pixels = Pixels.from_config(data, config.model)
    cache, report = cache_folder(data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        paths, held_out = with_splits(data)
        folder = held_folder = _known(data, paths, "data.paths", pixels.channels, cache, report)
        if held_out:
            held_folder = _known(data, held_out, "data.validation_paths", pixels.channels, cache, report)
    if (paths, held_out) != (data.paths, data.validation_paths):
        _log.warning("the pictures in %s are trained on, those in %s held out", _listed(paths), _listed(held_out))
    for folder_of_classes in (*paths, *held_out) if layout_of(data) == "folder" else ():
        if loose := loose_pictures(folder_of_classes):
            told_loose = "%d pictures in no folder of a class are left out: %s"
            _log.warning(told_loose, len(loose), _listed(loose))
    manifests = [read_manifest(known) or {} for known in dict.fromkeys((folder, held_folder))]
    report_bad_samples(
        [(path, reason) for manifest in manifests for path, reason in manifest["bad"]], data.on_bad_sample
    )
    return ImageScan(
        folder,
        held_folder,
        bool(held_out),
        manifests,
        (asdict(pixels), data.shift, data.turn, data.flip, data.random_crop),
    )


def add_figures(known: Images, config: RunConfig, seen: tuple[object, ...], scan: ImageScan) -> Images:
    """Adds sample counts, the majority accuracy and digests to ``known``."""
    content = [manifest["content"] for manifest in scan.manifests]
    train, held_labels = known.labels("train"), known.labels("validation")
    if not len(train):
        raise DataError(f"data.source={config.data.source}: there is nothing to train on")
    evaluated = min(len(held_labels), config.data.validation_max_samples or len(held_labels))
    majority = None
    if evaluated:
        chosen = held_labels[evaluated_samples(len(held_labels), evaluated)]
        majority = float((chosen == np.bincount(train).argmax()).mean())
    identity = (_FORMAT, *seen)
    apart = known.held_out_folder != known.folder
    return replace(
        known,
        train_samples=len(train),
        held_out_samples=len(held_labels),
        validation_samples=evaluated,
        majority_accuracy=majority,
        digest=digest_of(content[0], known.fraction, *identity),
        validation_digest=digest_of(content[-1], *identity) if apart and evaluated else "",
    )


def _names(folder: Path) -> list[str]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(manifest["labels"])


def _known(data: ImageConfig, patterns: list[str], key: str, channels: int, cache: Path, progress: Progress) -> Path:
    """Builds or finds the cache folder of the pictures that ``patterns`` name."""
    layout = layout_of(data)
    if layout == "digits":
        return prepare_digits(cache)
    if layout == "tar":
        listed = tar_entries(data, patterns, key, label_column_of(data), cache, progress)
    else:
        listed = entries(data, patterns, key, kept_in(cache))
    return prepare_files(data, listed, channels, cache, progress)


def _listed(paths: Sequence[object]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more or "no folder"
