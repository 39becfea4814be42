"""Pictures with a class, looked through once: each is decoded, and what cannot be used is named. No torch.

In the cache a source is a folder with ``labels.npy``, the class of each picture among the names in the manifest,
``hashes.npy``, by which the held-out ones are chosen, and ``files.json``, their paths and what each held; the digits
have ``pixels.npy`` instead. Pictures themselves stay where they are, and are decoded when a step wants them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.hardware import cpu_cores
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.blocks import hash_blocks
from mgpu_pipe.data.cache import (
    Progress,
    build_once,
    digest_of,
    no_progress,
    read_manifest,
    write_json,
    writing_to_cache,
)
from mgpu_pipe.data.classes import class_names, class_number, in_order
from mgpu_pipe.data.fingerprint import Fingerprint, fingerprints
from mgpu_pipe.data.image.decode import BadImageError
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.sources import DIGITS, FILES, digits_file, entries, read_digits, read_picture, told_by
from mgpu_pipe.data.image.tars import TARS, tar_entries
from mgpu_pipe.data.listed import Entry
from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.samples import Prepared, Split, evaluated_samples
from mgpu_pipe.data.text.split import document_hash, held_out
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.array_samples import ArraySamples

Images = TypeVar("Images", bound="PreparedImages")
_log = logging.getLogger(__name__)
_FORMAT = 1
_AT_ONCE = 64
"""Pictures that a process looks at before it answers."""
_POOL_FROM = 2048
"""Fewer are looked at here: starting processes takes longer."""
NAMED = 5
"""Bad pictures that a message names."""


@dataclass(frozen=True, kw_only=True)
class PreparedImages(Prepared):
    """All that a worker needs to load pictures with a class; made by :func:`prepare_images`."""

    kind: ClassVar[str] = "labelled_images"
    places: ClassVar[tuple[str, ...]] = ("folder", "held_out_folder")
    """The fields that are paths."""

    folder: Path
    """What is known of the training pictures."""
    held_out_folder: Path
    """Of the held-out ones; the same where a share of the pictures is held out."""
    fraction: float
    """That share; 1: all of the held-out folder, which is the training pictures' own."""
    classes: list[str]
    """Their names, in the order of their numbers."""
    num_pictures: int
    bad_samples: int
    """Pictures that were left out."""
    train_samples: int
    held_out_samples: int
    """Of which an evaluation takes ``validation_samples``."""
    validation_samples: int
    majority_accuracy: float | None
    """What saying the training data's most frequent class every time reaches on the evaluated samples."""
    digest: str
    validation_digest: str
    tokenizer_folder: Path | None = None
    unigram_perplexity: float | None = None

    def open(self, config: RunConfig, split: Split) -> ArraySamples:
        from mgpu_pipe.data.array_samples import ArraySamples
        from mgpu_pipe.data.image.dataset import LabelledImages

        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return ArraySamples(config, LabelledImages(config, split, self), partial(self.open, config, split))

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    def pictures(self, split: Split) -> NDArray[np.int64]:
        """Those of a split, in its folder."""
        hashes = load_array(self.folder_of(split) / "hashes.npy")
        if self.held_out_folder != self.folder or self.fraction == 1:
            return np.arange(len(hashes))
        chosen = held_out(hashes, self.fraction)
        return np.flatnonzero(chosen if split == "validation" else ~chosen)

    def labels(self, split: Split) -> NDArray[np.int64]:
        """The class of each sample of a split, in the order of :meth:`pictures`."""
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
    """Look through the pictures of ``config``, or find that done.

    Raises:
        ConfigError: a path, list of classes or size that cannot work; a package that is missing.
        DataError: a list that is broken; a picture that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
    """
    found = looked_through(config, progress)
    known = PreparedImages(
        **found.fields(config),
        classes=class_names(config, {name for one in found.manifests for name in one["labels"]}),
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        majority_accuracy=None,
        digest="",
        validation_digest="",
    )
    return counted(known, config, (known.classes, found.seen), found)


@dataclass(frozen=True)
class Found:
    """Pictures that were looked through.

    Attributes:
        folder, held: in the cache; see the module.
        seen: all that decides what the model sees of them.
    """

    folder: Path
    held: Path
    manifests: list[dict[str, Any]]
    seen: tuple[object, ...]

    def fields(self, config: RunConfig) -> dict[str, Any]:
        """Of what is known of them."""
        return {
            "folder": self.folder,
            "held_out_folder": self.held,
            "fraction": float(self.held == self.folder)
            if config.data.validation_paths
            else config.data.validation_fraction,
            "num_pictures": sum(one["pictures"] for one in self.manifests),
            "bad_samples": sum(len(one["bad"]) for one in self.manifests),
        }


def looked_through(config: RunConfig, progress: Progress | None) -> Found:
    """Look through the pictures of ``config``, or find that done; raises as :func:`prepare_images`."""
    data = config.data
    assert isinstance(data, ImageConfig)
    pixels = Pixels.of(data, config.model)
    cache, told = cache_folder(data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        folder = held = _known(data, data.paths, "data.paths", pixels.channels, cache, told)
        if data.validation_paths:
            held = _known(data, data.validation_paths, "data.validation_paths", pixels.channels, cache, told)
    manifests = [read_manifest(one) or {} for one in dict.fromkeys((folder, held))]
    say_bad([(path, reason) for one in manifests for path, reason in one["bad"]], data.on_bad_sample)
    return Found(folder, held, manifests, (asdict(pixels), data.shift, data.turn, data.flip, data.random_crop))


def counted(known: Images, config: RunConfig, seen: tuple[object, ...], found: Found) -> Images:
    """With its samples, its figures and its identity."""
    content = [one["content"] for one in found.manifests]
    train, held = known.labels("train"), known.labels("validation")
    if not len(train):
        raise DataError(f"data.source={config.data.source}: there is nothing to train on")
    evaluated = min(len(held), config.data.validation_max_samples or len(held))
    majority = None
    if evaluated:
        chosen = held[evaluated_samples(len(held), evaluated)]
        majority = float((chosen == np.bincount(train).argmax()).mean())
    identity = (_FORMAT, *seen)
    apart = known.held_out_folder != known.folder
    return replace(
        known,
        train_samples=len(train),
        held_out_samples=len(held),
        validation_samples=evaluated,
        majority_accuracy=majority,
        digest=digest_of(content[0], known.fraction, *identity),
        validation_digest=digest_of(content[-1], *identity) if apart and evaluated else "",
    )


def say_bad(bad: Sequence[tuple[str, str]], on_bad_sample: str) -> None:
    """Name pictures that cannot be used, and why.

    Raises:
        DataError: ``data.on_bad_sample=stop``.
    """
    if not bad:
        return
    lines = [f"{path} {reason}" for path, reason in bad[:NAMED]]
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    listed = "; ".join(lines) + more
    if on_bad_sample == "stop":
        one = len(bad) == 1
        what = "a picture" if one else f"{len(bad)} pictures"
        raise DataError(f"{listed}: replace {what}, or leave {'it' if one else 'them'} out by data.on_bad_sample=skip")
    _log.warning("%d of the pictures are left out: %s", len(bad), listed)


def _names(folder: Path) -> list[str]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return list(manifest["labels"])


def _known(data: ImageConfig, patterns: list[str], key: str, channels: int, cache: Path, progress: Progress) -> Path:
    """The folder in the cache of what is known of some pictures, made if it is not there."""
    if data.source in DIGITS:
        return known_digits(cache)
    if data.source in TARS:
        listed = tar_entries(data, patterns, key, told_by(data), cache, progress)
    else:
        listed = entries(data, patterns, key)
    return known_files(data, listed, channels, cache, progress)


def known_digits(cache: Path) -> Path:
    """That of scikit-learn's digits."""
    file = digits_file()
    content = digest_of(DIGITS[0], hash_blocks(file))
    folder = cache / "images" / content
    build_once(folder, partial(_build_digits, file, content))
    return folder


def known_files(data: ImageConfig, listed: Sequence[Entry], channels: int, cache: Path, progress: Progress) -> Path:
    """That of files, in their order, the bad ones left out and named in the manifest."""
    whole = {one.path for one in listed if one.part is None and one.path.stat().st_size}
    prints = fingerprints(sorted(whole), cache, progress) if whole else {}
    held = [_held(one, prints) for one in listed]
    files = [
        [f"{one.path.absolute()}{one.part.offset if one.part else ''}", one.label, known.digest if known else ""]
        for one, known in zip(listed, held, strict=True)
    ]
    content = digest_of("images", [entry[1:] for entry in files])
    folder = cache / "images" / digest_of(_FORMAT, channels, files)
    build_once(folder, partial(_build_files, data, listed, held, channels, content, progress))
    return folder


def _held(one: Entry, prints: Mapping[Path, Fingerprint]) -> Fingerprint | None:
    """What it holds; None where that is nothing."""
    if one.part is None:
        return prints.get(one.path)
    return one.part.held if one.part.held.size else None


def _build_digits(file: Path, content: str, out: Path) -> dict[str, Any]:
    pixels, labels = read_digits(file)
    np.save(out / "pixels.npy", pixels)
    return _write(out, labels, [document_hash(picture.tobytes()) for picture in pixels], [], content)


def _build_files(
    data: ImageConfig,
    listed: Sequence[Entry],
    held: Sequence[Fingerprint | None],
    channels: int,
    content: str,
    progress: Progress,
    out: Path,
) -> dict[str, Any]:
    looks = [(one.path, known, one.part.offset if one.part else None) for one, known in zip(listed, held, strict=True)]
    faults = _faults(looks, channels, data, progress)
    good = [one for one, fault in zip(listed, faults, strict=True) if fault is None]
    known = [one for one, fault in zip(held, faults, strict=True) if one is not None and fault is None]
    bad = [
        [one.origin if one.part else str(one.path), fault]
        for one, fault in zip(listed, faults, strict=True)
        if fault is not None
    ]
    described: dict[str, list[Any]] = {
        "paths": [str(one.path.absolute()) for one in good],
        "sizes": [one.size for one in known],
        "blocks": [list(one.blocks) for one in known],
    }
    if any(one.part for one in good):
        described["offsets"] = [one.part.offset for one in good if one.part]
    write_json(out / FILES, described)
    return _write(out, [one.label for one in good], [document_hash(one.digest) for one in known], bad, content)


def _write(
    out: Path, labels: Sequence[str], hashes: Sequence[int], bad: list[list[str]], content: str
) -> dict[str, Any]:
    names = sorted(set(labels), key=in_order)
    numbers = {name: number for number, name in enumerate(names)}
    save_array(out / "labels.npy", np.array([numbers[name] for name in labels], np.int64))
    save_array(out / "hashes.npy", np.array(hashes, np.uint64))
    return {"labels": names, "pictures": len(labels), "bad": bad, "content": content}


Look = tuple[Path, Fingerprint | None, int | None]


def _faults(pictures: Sequence[Look], channels: int, data: ImageConfig, progress: Progress) -> list[str | None]:
    """For each picture why it cannot be used, or None."""
    parts = [list(pictures[at : at + _AT_ONCE]) for at in range(0, len(pictures), _AT_ONCE)]
    workers = cpu_cores() if data.tokenize_workers == "auto" else data.tokenize_workers
    if len(pictures) < _POOL_FROM or workers == 1:
        looked = map(_looker(channels), parts)
    else:
        told = "a process that looks at pictures died (killed, or out of memory): use data.tokenize_workers=1"
        looked = work_in_order(parts, workers, _looker, (channels,), ahead=4, what=told)  # type: ignore[assignment]
    faults: list[str | None] = []
    for part in looked:
        faults += part
        progress("look", len(faults), len(pictures))
    return faults


def _looker(channels: int) -> Callable[[list[Look]], list[str | None]]:
    return lambda part: [_fault(*look, channels) for look in part]


def _fault(path: Path, expected: Fingerprint | None, offset: int | None, channels: int) -> str | None:
    if expected is None:
        return "is empty"
    try:
        read_picture(path, expected, channels, offset)
    except BadImageError as error:
        return str(error)
    return None
