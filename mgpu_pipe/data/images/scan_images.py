"""Scans pictures once: decodes each and names those that cannot be used.

A cache folder holds ``labels.npy``, the class of each picture as an index into the manifest's names, ``hashes.npy``,
which decide the held-out split, and ``files.json``, paths and content hashes (the digits have ``pixels.npy`` instead).
Pictures stay where they are and are decoded when a step needs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.bad_samples import BadSampleError, unusable_files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, hash_blocks, write_json
from mgpu_pipe.data.file_lists import Entry
from mgpu_pipe.data.fingerprint import Fingerprint, fingerprints
from mgpu_pipe.data.images.augment import erase
from mgpu_pipe.data.images.decode_image import MODES, pillow
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_files import FILES, digits_file, read_digits, read_picture
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.ordered_work import scan_in_order
from mgpu_pipe.data.prepared_splits import store_labels
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.token_store import load_array, save_array

if TYPE_CHECKING:
    from PIL.Image import Image

    from mgpu_pipe.data.images.prepare_images import PreparedImages


class StoredPictures:
    """Pictures of a scanned folder.

    Args:
        folder: of the cache; see :mod:`mgpu_pipe.data.images.scan_images`.
        channels: of the model.
    """

    def __init__(self, folder: Path, channels: int) -> None:
        self._channels, self._pixels = channels, None
        if (folder / "pixels.npy").is_file():
            self._pixels = load_array(folder / "pixels.npy")
        else:
            self._files = json.loads((folder / FILES).read_text(encoding="utf-8"))

    def picture(self, place: int) -> Image:
        """Decodes the picture at an index of the folder, in the model's channels."""
        if self._pixels is not None:
            image: Image = pillow().fromarray(np.ascontiguousarray(self._pixels[place]))
            return image.convert(MODES[self._channels])
        known = Fingerprint(self._files["sizes"][place], tuple(self._files["blocks"][place]))
        offset = self._files["offsets"][place] if "offsets" in self._files else None
        return read_picture(Path(self._files["paths"][place]), known, self._channels, offset)


def picture_digests(folder: Path) -> list[str]:
    """Content hash of each picture file of a cache folder."""
    known = json.loads((folder / FILES).read_text(encoding="utf-8"))
    files = zip(known["sizes"], known["blocks"], strict=True)
    return [Fingerprint(size, tuple(blocks)).digest for size, blocks in files]


class LabelledImages:
    """One split of labelled pictures. A sample has ``pixel_values``, float32 of shape (channels, size, size), and
    ``labels``, int64; with cached tower features also its number ``shown``, int64."""

    def __init__(self, model: ModelConfig, data: DataConfig, split: Split, prepared: PreparedImages) -> None:
        assert isinstance(data, ImageConfig)
        self._data, self._split, self._pixels = data, split, Pixels.from_config(data, model)
        self._pictures, self._labels = prepared.pictures(split), prepared.labels(split)
        self._stored = StoredPictures(prepared.folder_of(split), self._pixels.channels)

    @property
    def valid_units(self) -> NDArray[np.int64]:
        return np.ones(len(self._pictures), np.int64)

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        image = self.picture(index)
        if self._split == "train":
            values = self._pixels.array(self._pixels.augment(image, self._data, random))
            erase(values, self._data.augment, random)
        else:
            values = self._pixels.array(self._pixels.scale(image))
        cached = {"shown": np.int64(index)} if self._data.cache_features else {}
        return {"pixel_values": values, "labels": self._labels[index], **cached}

    def positions(self, index: int) -> int:
        return 0

    def picture(self, index: int) -> Image:
        """The stored picture, in the model's channels."""
        return self._stored.picture(int(self._pictures[index]))


_FORMAT = 1
_POOL_FROM = 2048


def prepare_digits(cache: Path) -> Path:
    """Builds or finds the cache folder of scikit-learn's digits."""
    file = digits_file()
    content = digest_of("digits", hash_blocks(file))
    folder = cache / "images" / content
    build_once(folder, partial(_build_digits, file, content))
    return folder


def prepare_files(data: ImageConfig, listed: Sequence[Entry], channels: int, cache: Path, progress: Progress) -> Path:
    """Builds or finds the cache folder of picture files, in their order; the manifest names the bad ones."""
    whole = {entry.path for entry in listed if entry.part is None and not entry.fault}
    unusable = unusable_files(sorted(whole))
    prints = fingerprints(sorted(whole - unusable.keys()), cache, progress) if whole else {}
    fingerprints_of = [
        entry.part.fingerprint if entry.part else None if entry.fault else prints.get(entry.path) for entry in listed
    ]
    faults = [_known_fault(entry, known, unusable) for entry, known in zip(listed, fingerprints_of, strict=True)]
    files = [
        [
            f"{entry.path.absolute()}{entry.part.offset if entry.part else ''}",
            entry.label,
            fault or (known and known.digest),
        ]
        for entry, known, fault in zip(listed, fingerprints_of, faults, strict=True)
    ]
    known_anywhere = [item.fault_anywhere or entry[2] for item, entry in zip(listed, files, strict=True)]
    content = digest_of("images", [[item.label, known] for item, known in zip(listed, known_anywhere, strict=True)])
    folder = cache / "images" / digest_of(_FORMAT, channels, files)
    build_once(folder, partial(_build_files, data, listed, fingerprints_of, faults, channels, content, progress))
    return folder


def _known_fault(entry: Entry, fingerprint: Fingerprint | None, unusable: Mapping[Path, str]) -> str:
    """Why a sample cannot be used, known before decoding; empty if nothing is wrong."""
    if entry.fault or entry.part is None:
        return entry.fault or unusable.get(entry.path, "")
    return "" if fingerprint is not None and fingerprint.size else "is empty"


def _build_digits(file: Path, content: str, out: Path) -> dict[str, Any]:
    pixels, labels = read_digits(file)
    np.save(out / "pixels.npy", pixels)
    return _write(out, labels, [document_hash(picture.tobytes()) for picture in pixels], [], content)


def _build_files(
    data: ImageConfig,
    listed: Sequence[Entry],
    prints_of: Sequence[Fingerprint | None],
    faults: Sequence[str],
    channels: int,
    content: str,
    progress: Progress,
    out: Path,
) -> dict[str, Any]:
    """Decode the listed pictures, and write files, hashes and labels of the good ones to ``out``.

    Args:
        prints_of: the fingerprint of each entry's file; None where it cannot be read.
        faults: reasons to leave an entry out that are known before decoding; empty for the others.

    Returns:
        The entries of the cache folder's manifest.
    """
    faults = _scan(data, listed, prints_of, faults, channels, progress)
    good = [entry for entry, fault in zip(listed, faults, strict=True) if not fault]
    known = [
        fingerprint
        for fingerprint, fault in zip(prints_of, faults, strict=True)
        if fingerprint is not None and not fault
    ]
    # Name a picture with several captions once.
    bad = dict.fromkeys((entry.name, fault) for entry, fault in zip(listed, faults, strict=True) if fault)
    described: dict[str, list[Any]] = {
        "paths": [str(entry.path.absolute()) for entry in good],
        "sizes": [fingerprint.size for fingerprint in known],
        "blocks": [list(fingerprint.blocks) for fingerprint in known],
    }
    if any(entry.part for entry in good):
        described["offsets"] = [entry.part.offset for entry in good if entry.part]
    write_json(out / FILES, described)
    hashes = [document_hash(fingerprint.digest) for fingerprint in known]
    prepare_files = _write(out, [entry.label for entry in good], hashes, [list(entry) for entry in bad], content)
    return {**prepare_files, "pictures": len({(entry.path, entry.part) for entry in good})}


def _scan(
    data: ImageConfig,
    listed: Sequence[Entry],
    prints_of: Sequence[Fingerprint | None],
    faults: Sequence[str],
    channels: int,
    progress: Progress,
) -> list[str]:
    """The fault of each entry, after decoding every picture that had none once; empty for a good picture."""
    looks = {
        (entry.path, entry.part.offset if entry.part else None): known
        for entry, known, fault in zip(listed, prints_of, faults, strict=True)
        if known is not None and not fault
    }
    seen = scan_in_order(
        [(*look, known) for look, known in looks.items()],
        partial(_fault, channels=channels),
        data.tokenize_workers,
        progress,
        "look",
        pool_from=_POOL_FROM,
    )
    fault_of = dict(zip(looks, seen, strict=True))
    return [
        fault or fault_of[entry.path, entry.part.offset if entry.part else None]
        for entry, fault in zip(listed, faults, strict=True)
    ]


def _write(
    out: Path, labels: Sequence[str], hashes: Sequence[int], bad: list[list[str]], content: str
) -> dict[str, Any]:
    names = store_labels(out, labels)
    save_array(out / "hashes.npy", np.array(hashes, np.uint64))
    return {"labels": names, "pictures": len(labels), "bad": bad, "content": content}


Look = tuple[Path, int | None, Fingerprint]


def _fault(look: Look, channels: int) -> str:
    """Why a picture cannot be used; empty for a usable one."""
    path, offset, expected = look
    try:
        read_picture(path, expected, channels, offset)
    except BadSampleError as error:
        return str(error)
    return ""
