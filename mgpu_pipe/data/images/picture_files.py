"""Sources of pictures with a class: folders, lists of paths, and scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.files import files_below, is_no_data
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, read_part
from mgpu_pipe.data.images.decode_image import SUFFIXES, decode
from mgpu_pipe.data.images.image_keys import CaptionConfig, ImageConfig
from mgpu_pipe.data.images.picture_source import layout_of
from mgpu_pipe.data.tables import CAPTION, Entry, Keep, entries_of
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.system.local_files import expand_home

TRAIN, HELD_OUT = "train", ("validation", "test")
SPLITS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of split folders in Hugging Face's imagefolder."""
DIGITS_FILE = Path("datasets/data/digits.csv.gz")
DIGITS_SIDE, DIGITS_BRIGHTEST = 8, 16
WHAT = {"label_column": "class", "caption_column": CAPTION}
FILES = "files.json"
"""Cache file of paths and content hashes."""


def entries(data: DataConfig, patterns: list[str], key: str, keep: Keep | None = None) -> list[Entry]:
    """Lists the pictures that ``patterns`` name, in a fixed order; a caption may replace the class.

    Args:
        keep: see :func:`mgpu_pipe.data.tables.entries_of`.

    Raises:
        ConfigError: a pattern that names no folder (image_folder) or list (image_list), or a folder without pictures.
        DataError: a list that cannot be read, lacks a column, or names a file that is not there.
    """
    assert isinstance(data, ImageConfig)
    if layout_of(data) == "folder":
        return [entry for pattern in patterns for entry in _in_folder(pattern, key)]
    named = ("image_column", *label_column_of(data))
    return list(entries_of(files.expand_paths(patterns, key), data, key, *named, keep=keep))


def label_column_of(data: DataConfig) -> tuple[str, str]:
    """The key that names the column of classes or captions, and what its values are."""
    column = "caption_column" if isinstance(data, CaptionConfig) else "label_column"
    return column, WHAT[column]


def _in_folder(pattern: str, key: str) -> Iterator[Entry]:
    root = expand_home(pattern)
    if pattern.startswith(DATA) or not root.is_dir():
        fix = "give a folder that holds a folder of pictures for each class"
        raise ConfigError(key, pattern, fix, "is no folder here")
    classes = classes_in(root)
    if not classes:
        fix = f"put each class's pictures ({', '.join(SUFFIXES)}) into a folder of its name below it"
        raise ConfigError(key, pattern, fix, "holds no folder of pictures")
    for folder, paths in classes.items():
        yield from (Entry(path, folder, str(path)) for path in paths)


def classes_in(root: Path) -> dict[str, list[Path]]:
    """Folders of classes below ``root`` by name, with the pictures below each; skips hidden ones."""
    stat, classes = root.stat(), {}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and not is_no_data(folder.name):
            # A link to a parent folder would put every picture into its class.
            below = files_below(folder, walked={(stat.st_dev, stat.st_ino)})
            if pictures := sorted(path for path in below if path.suffix.lower() in SUFFIXES):
                classes[folder.name] = pictures
    return classes


def loose_pictures(root: str) -> list[Path]:
    """Pictures next to the folders of classes; they have no class."""
    visible = (path for path in sorted(expand_home(root).iterdir()) if not is_no_data(path.name))
    return [path for path in visible if path.suffix.lower() in SUFFIXES and path.is_file()]


def with_splits(data: ImageConfig) -> tuple[list[str], list[str]]:
    """``data.paths`` and ``data.validation_paths``, with folders of splits (such as ``train`` and ``val``) replaced by
    these splits.

    Raises:
        ConfigError: it holds splits and classes.
    """
    trained, held_out = list[str](), list[str]()
    for key, patterns in (("data.paths", data.paths), ("data.validation_paths", data.validation_paths)):
        for pattern in patterns:
            splits = _splits_in(pattern, key) if layout_of(data) == "folder" else {}
            first_held = next((splits[kind] for kind in HELD_OUT if kind in splits), None)
            if key == "data.paths":
                trained.append(splits.get(TRAIN, pattern))
                if first_held is not None and not data.validation_paths and data.validation_fraction > 0:
                    held_out.append(first_held)
            else:
                held_out.append(first_held or pattern)
    return trained, held_out


def _splits_in(pattern: str, key: str) -> dict[str, str]:
    """Splits that a folder has instead of classes, by kind."""
    root = expand_home(pattern)
    if not root.is_dir():
        return {}
    folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and not is_no_data(folder.name)]
    kinds = {kind: folder for folder in folders for kind, names in SPLITS.items() if folder.name.lower() in names}
    if TRAIN not in kinds:
        return {}
    others = [folder for folder in folders if folder not in kinds.values() and _holds_pictures(folder)]
    if not others:
        return {kind: str(folder) for kind, folder in kinds.items()}
    if len(kinds) == 1:
        return {}  # a class of trains
    fix = "name the splits by data.paths and data.validation_paths"
    reason = f"holds the splits {' and '.join(folder.name for folder in kinds.values())}, and {others[0].name} besides"
    raise ConfigError(key, pattern, fix, reason)


def _holds_pictures(folder: Path) -> bool:
    return any(path.suffix.lower() in SUFFIXES for path in files_below(folder))


def digits_file() -> Path:
    """Finds scikit-learn's file of handwritten digits without importing the package, which takes a second.

    Raises:
        ConfigError: it is not installed.
    """
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / DIGITS_FILE).is_file():
            return Path(folder) / DIGITS_FILE
    fix = "install it: pip install 'mgpu_pipe[image]'"
    raise ConfigError("data.source", "digits", fix, "the digits come with scikit-learn, which is not installed")


def read_digits(path: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Reads grey pictures, ``(1797, 8, 8)``, and their classes (Alpaydin and Kaynak 1998)."""
    rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    pixels = rows[:, :-1].reshape(-1, DIGITS_SIDE, DIGITS_SIDE)
    return (pixels * 255 // DIGITS_BRIGHTEST).astype(np.uint8), [str(label) for label in rows[:, -1]]


def read_picture(path: Path, expected: Fingerprint, channels: int, offset: int | None = None) -> Any:
    """Decodes a picture whose content has not changed since its scan.

    Args:
        offset: of the picture in the file; None where it is the whole file.

    Raises:
        BadSampleError: it cannot be used.
        DataError: it is gone or changed.
    """
    try:
        return decode(read_part(path, expected, offset), channels)
    except ChangedFileError as error:
        raise DataError(f"{path}: changed since the pictures were looked through; start the run again") from error
