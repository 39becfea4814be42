"""Sources of pictures with a class: folders, lists of paths, and scikit-learn's handwritten digits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.class_folders import ClassFolders
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, read_part
from mgpu_pipe.data.images.decode_image import SUFFIXES, decode
from mgpu_pipe.data.images.image_keys import CaptionConfig, ImageConfig
from mgpu_pipe.data.images.picture_source import layout_of
from mgpu_pipe.data.tables import CAPTION, Entry, Keep, entries_of
from mgpu_pipe.errors import ConfigError, DataError

CLASS_FOLDERS = ClassFolders("pictures", SUFFIXES)
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
        return [entry for pattern in patterns for entry in CLASS_FOLDERS.entries(pattern, key)]
    named = ("image_column", *label_column_of(data))
    return list(entries_of(files.expand_paths(patterns, key), data, key, *named, keep=keep))


def label_column_of(data: DataConfig) -> tuple[str, str]:
    """The key that names the column of classes or captions, and what its values are."""
    column = "caption_column" if isinstance(data, CaptionConfig) else "label_column"
    return column, WHAT[column]


def with_splits(data: ImageConfig) -> tuple[list[str], list[str]]:
    """Folders of training and of held-out pictures; see :meth:`ClassFolders.with_splits`."""
    if layout_of(data) != "folder":
        return data.paths, data.validation_paths
    return CLASS_FOLDERS.with_splits(data)


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
