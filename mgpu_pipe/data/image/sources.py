"""Where pictures with a class come from: folders, lists of paths, and scikit-learn's handwritten digits. No torch."""

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
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, read_part
from mgpu_pipe.data.image.decode import SUFFIXES, decode
from mgpu_pipe.data.image.keys import CaptionConfig, ImageConfig
from mgpu_pipe.data.listed import Entry, entries_of
from mgpu_pipe.errors import ConfigError, DataError

DIGITS = ("digits", "captioned_digits")
FOLDERS = ("image_folder", "captioned_folder")
DIGITS_FILE = Path("datasets/data/digits.csv.gz")
DIGITS_SIDE, DIGITS_BRIGHTEST = 8, 16
WHAT = {"label_column": "class", "caption_column": "caption"}
FILES = "files.json"
"""In the cache: the paths of pictures, and what each held."""


def entries(data: DataConfig, patterns: list[str], key: str) -> list[Entry]:
    """The pictures that ``patterns`` name, in an order of their own; a caption stands in place of a class.

    Raises:
        ConfigError: a pattern that names no folder (image_folder) or list (image_list), or a folder without pictures.
        DataError: a list that cannot be read, lacks a column, or names a file that is not there.
    """
    assert isinstance(data, ImageConfig)
    if data.source in FOLDERS:
        return [entry for pattern in patterns for entry in _in_folder(pattern, key)]
    named = ("image_column", *told_by(data))
    return [entry for path in files.expand_paths(patterns, key) for entry in entries_of(path, data, key, *named)]


def told_by(data: DataConfig) -> tuple[str, str]:
    """The key that names what is said of a picture, and what that is."""
    told = "caption_column" if isinstance(data, CaptionConfig) else "label_column"
    return told, WHAT[told]


def _in_folder(pattern: str, key: str) -> Iterator[Entry]:
    root = Path(pattern).expanduser()
    if pattern.startswith(DATA) or not root.is_dir():
        fix = "give a folder that holds a folder of pictures for each class"
        raise ConfigError(key, pattern, fix, "is no folder here")
    paths = [path for path in sorted(root.glob("*/**/*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not paths:
        fix = f"put each class's pictures ({', '.join(SUFFIXES)}) into a folder of its name below it"
        raise ConfigError(key, pattern, fix, "holds no folder of pictures")
    for path in paths:
        yield Entry(path, path.relative_to(root).parts[0], str(path))


def digits_file() -> Path:
    """scikit-learn's file of handwritten digits; the package is not imported, which would take a second.

    Raises:
        ConfigError: it is not installed.
    """
    found = find_spec("sklearn")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / DIGITS_FILE).is_file():
            return Path(folder) / DIGITS_FILE
    fix = "install it: pip install 'mgpu_pipe[image]'"
    raise ConfigError("data.source", DIGITS[0], fix, "the digits come with scikit-learn, which is not installed")


def read_digits(path: Path) -> tuple[NDArray[np.uint8], list[str]]:
    """Grey pictures, ``(1797, 8, 8)``, and their classes (Alpaydin and Kaynak 1998)."""
    rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    pixels = rows[:, :-1].reshape(-1, DIGITS_SIDE, DIGITS_SIDE)
    return (pixels * 255 // DIGITS_BRIGHTEST).astype(np.uint8), [str(label) for label in rows[:, -1]]


def read_picture(path: Path, expected: Fingerprint, channels: int, offset: int | None = None) -> Any:
    """A picture that holds what it held when it was looked at.

    Args:
        offset: where it begins in the file; None where it is all of it.

    Raises:
        BadImageError: it cannot be used.
        DataError: it is gone, or another one.
    """
    try:
        return decode(read_part(path, expected, offset), channels)
    except ChangedFileError as error:
        raise DataError(f"{path}: changed since the pictures were looked through; start the run again") from error
