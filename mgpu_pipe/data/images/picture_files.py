"""Where pictures with classes or captions are: folders, lists of paths, tar files, and scikit-learn's digits.

In WebDataset's tar files (https://github.com/webdataset/webdataset), members that share a name up to the first dot are
a sample. A tar file is read once; several archives in one file are read in order. The cache keeps an index under the
file's hash: each picture's offset, content hash and label. Pictures are read from their offsets; nothing is unpacked.
Unusable content is named: a sample without a picture or label, a member that is not a file, and the place where a file
breaks off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import unusable_files
from mgpu_pipe.data.cache import BLOCK_BYTES, Progress, block_hash, build_once, digest_of, write_json
from mgpu_pipe.data.compressed import HEAD, TAR, binary_form
from mgpu_pipe.data.containers import BadTarError, tar_members
from mgpu_pipe.data.file_lists import CAPTION, ClassFolders, Entry, Part, entries_of, fault_of, labels_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, open_data, read_part
from mgpu_pipe.data.images.decode_image import SUFFIXES, decode
from mgpu_pipe.data.images.image_keys import CaptionConfig, ImageConfig, layout_of
from mgpu_pipe.data.tables import Keep
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
        keep: see :func:`mgpu_pipe.data.file_lists.entries_of`.

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
    """Key of the column of classes or captions, and the noun for its values."""
    column = "caption_column" if isinstance(data, CaptionConfig) else "label_column"
    return column, WHAT[column]


def with_splits(data: ImageConfig) -> tuple[list[str], list[str]]:
    """Folders of training and of held-out pictures; see :meth:`ClassFolders.with_splits`."""
    if layout_of(data) != "folder":
        return data.paths, data.validation_paths
    return CLASS_FOLDERS.with_splits(data)


def digits_file() -> Path:
    """Finds scikit-learn's file of digits without the import, which takes a second; ConfigError if not installed."""
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
        raise DataError(f"{path}: changed since its scan; start the run again") from error


TOLD = {"label_column": "cls", "caption_column": "txt"}
"""Suffix of the member that holds a column's value."""
INDEX = "index.json"
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_FORMAT = 2
_LONGEST = 1 << 20
"""Largest label or caption in bytes."""


class Member(NamedTuple):
    """A regular file in a tar file."""

    sample: str
    ending: str
    offset: int
    size: int
    archive: int

    @property
    def is_picture(self) -> bool:
        return f".{self.ending}" in SUFFIXES


def tar_entries(
    data: ImageConfig, patterns: list[str], key: str, label_rule: tuple[str, str], cache: Path, progress: Progress
) -> list[Entry]:
    """Pictures of the tar files that ``patterns`` name, in file order.

    Args:
        label_rule: the key of ``data`` that names the label, and what the label is.

    Raises:
        ConfigError: a pattern that matches no file.
        ChangedFileError: a file changed since it was hashed.
    """
    entries, paths = list[Entry](), files.expand_paths(patterns, key)
    unusable, column = unusable_files(paths), str(getattr(data, label_rule[0]))
    prints = fingerprints([path for path in paths if path not in unusable], cache, progress)
    for path in paths:
        if path in unusable:
            entries.append(Entry(path, "", str(path), fault=unusable[path]))
            continue
        folder = cache / "tars" / digest_of(_FORMAT, prints[path].digest, column, *label_rule)
        build_once(folder, partial(_build, path, prints[path], column, label_rule))
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        for sample, label, offset, size, blocks in index["rows"]:
            entries.append(Entry(path, label, f"{path}: {sample}", Part(offset, Fingerprint(size, tuple(blocks)))))
        for name, fault in index["bad"]:
            entries.append(Entry(path, "", f"{path}: {name}" if name else str(path), fault=fault))
    return entries


def check_tars(data: ImageConfig, patterns: list[str], key: str) -> None:
    """Checks that files begin as tar files; ConfigError if none matches, DataError with ``data.on_bad_sample=stop``."""
    paths = files.expand_paths(patterns, key)
    unusable = unusable_files(paths) if data.on_bad_sample == "skip" else {}
    for path in paths:
        if path in unusable:
            continue
        with open_data(path) as file:
            try:
                next(tar_members(file, path.stat().st_size), None)
            except BadTarError as error:
                if data.on_bad_sample == "stop":
                    raise DataError(f"{path}: {_describe(file, error)}; {files.REPLACE}") from error


def _build(path: Path, expected: Fingerprint, column: str, label_rule: tuple[str, str], out: Path) -> dict[str, Any]:
    rows, bad = list[list[Any]](), list[tuple[str, str]]()
    with open_data(path, expected) as file:
        members = _members(file, expected.size, bad)
        for (_, sample), several in groupby(members, lambda member: (member.archive, member.sample)):
            try:
                labels, picture = _sample(sample, list(several), file, column, label_rule)
            except DataError as error:
                bad.append((sample, fault_of(error, sample)))
                continue
            raw = _read(file, picture)
            blocks = [block_hash(raw[start : start + BLOCK_BYTES]) for start in range(0, len(raw), BLOCK_BYTES)]
            for label, fault in labels:
                if fault:
                    bad.append((sample, fault))
                else:
                    rows.append([sample, label, picture.offset, picture.size, blocks])
    if not rows and not bad:
        bad.append(("", "holds no sample"))
    write_json(out / INDEX, {"rows": rows, "bad": bad})
    return {"samples": len(rows)}


def _members(file: IO[bytes], size: int, bad: list[tuple[str, str]]) -> Iterator[Member]:
    """Members with a suffix, in order; others belong to no sample. Appends unreadable ones to ``bad``."""
    try:
        for member in tar_members(file, size):
            if member.is_folder:
                continue
            if not member.is_file:
                bad.append((repr(member.name), "is a link or no plain file"))
            elif member.name.startswith("/") or ".." in member.name.split("/"):
                bad.append((repr(member.name), "leads out of the tar file"))
            elif named := _NAME.fullmatch(member.name):
                yield Member(named[1], named[2].lower(), member.offset, member.size, member.archive)
    except BadTarError as error:
        bad.append(("", _describe(file, error)))


def _describe(file: IO[bytes], error: BadTarError) -> str:
    """Why a file cannot be read as tar: it has another format, or the error's message."""
    file.seek(0)
    form = binary_form(file.read(HEAD))
    return str(error) if form is None or form[0] == TAR else f"is {form[0]}, not an uncompressed tar file"


def _sample(
    name: str, parts: list[Member], file: IO[bytes], column: str, label_rule: tuple[str, str]
) -> tuple[list[tuple[str, str]], Member]:
    """Labels of a sample's picture (:func:`labels_of`), and its member; DataError says why it cannot be used."""
    pictures = [part for part in parts if part.is_picture]
    if len(pictures) != 1:
        raise DataError(f"{name}: holds {len(pictures)} pictures, not one")
    key, what = label_rule
    by_ending = {part.ending: part for part in parts}
    member = by_ending.get(TOLD[key]) or by_ending.get("json")
    if member is None:
        raise DataError(f"{name}: has no member that ends with .{TOLD[key]} or .json")
    if member.size > _LONGEST:
        raise DataError(f"{name}: has a {what} of {member.size} bytes")
    text = files.decode(_read(file, member), name)
    if member.ending != "json":
        return list(labels_of({column: text.strip()}, column, name, what)), pictures[0]
    row = files.json_row(text, name, column)
    files.require_columns(row, name, {f"data.{key}": column})
    return list(labels_of(row, column, name, what)), pictures[0]


def _read(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)
