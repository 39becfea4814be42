"""Files with classes or texts: tables with a column of paths, and a folder of files for each class.

Folders of classes have the layout of Hugging Face's imagefolder and audiofolder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import NAMED, OR_SKIP, BadSampleError, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.files import files_below, is_no_data
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.parquet_rows import is_columnar
from mgpu_pipe.data.tables import (
    LOOKED_AT,
    Keep,
    RowLines,
    find_file,
    is_embedded,
    keep_nothing,
    nested_value,
    row_lines,
)
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.system.local_files import expand_home

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
GOLD = "gold_label"
"""Column of SNLI and MultiNLI, whose ``-`` says that the annotators agreed on no class."""
CAPTION, CLASSES = "caption", "classes"
_TIMES = (("start", "end"), ("start_time", "end_time"), ("begin", "end"), ("onset", "offset"))
"""Columns of where a row's part of its recording begins and ends, in seconds."""
_QUOTED = r"""(?:'[^'\\]*'|"[^"\\]*")"""
PYTHON_LIST = re.compile(rf"\[\s*{_QUOTED}(?:\s*,\s*{_QUOTED})*\s*\]")
"""A list of texts as Python prints it, and pandas writes it."""
_USUAL_SUFFIXES = (
    *(".jpg", ".JPG", ".jpeg", ".JPEG", ".png", ".PNG", ".webp", ".tif", ".tiff"),
    *(".wav", ".WAV", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm"),
)
"""Suffixes of files that tables, such as Kaggle's, name by an id alone."""
_MOST_NEAR = 1000
"""Entries of a folder among which a missing file's folder is looked for."""
LONGEST_NAME = 200
"""Characters of a file name in a message: the column may also hold captions or base64 pictures."""


@dataclass(frozen=True)
class Part:
    """Part of a file, from ``offset`` on, and its fingerprint."""

    offset: int
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Entry:
    """A file, or a part of one, and its label.

    Attributes:
        origin: where the sample is named.
        fault: why the sample cannot be used; empty where nothing is known to be wrong.
        seconds: length of the recording, or of a part of it, that the row states; None without one.
    """

    path: Path
    label: str
    origin: str
    part: Part | None = None
    fault: str = ""
    seconds: float | None = None

    @property
    def name(self) -> str:
        """Name in messages: the file, or the origin."""
        return self.origin if self.part or self.fault or is_embedded(self.path) else str(self.path)

    @property
    def fault_anywhere(self) -> str:
        """The fault without the folder of its list, so that it stays the same where the data moves."""
        folder = str(self.path.parent / "_")[:-1]
        return self.fault.replace(folder, "") if folder else self.fault


def fault_of(error: DataError | str, origin: str) -> str:
    """Reason in a sample's error, without the origin and the fix."""
    return str(error).removeprefix(f"{origin}: ").removesuffix(f"; {files.FIX}")


def entries_of(
    paths: Sequence[Path], data: DataConfig, key: str, file_key: str, told_key: str, what: str, keep: Keep | None = None
) -> Iterator[Entry]:
    """Yields the samples that lists name, in order; a row with a list of captions gives one for each.

    With ``data.on_bad_sample=skip`` a broken row, or the rest of a broken list, is an entry with a fault, as long as
    one row is whole.

    Args:
        key: the key that names the lists.
        file_key, told_key: keys of ``data`` that name the columns of paths (relative to the list's folder) and of
            classes or texts; ``what`` names the latter.
        keep: takes files that the rows hold; None for a check, which looks at the first rows of such a table.

    Raises:
        ConfigError: a path has another suffix than a list.
        DataError: no row is whole; with ``data.on_bad_sample=stop``, a list that cannot be read, or a row that lacks a
            column or names a file that is not there.
    """
    columns = {name: str(getattr(data, name)) for name in (file_key, told_key)}
    skips, first, whole = data.on_bad_sample == "skip", "", False
    for path in paths:
        plain = Path(path.stem) if codec_of(path) else path
        if plain.suffix.lower() not in SUFFIXES:
            raise ConfigError(key, path, f"give files that end with {' or '.join(SUFFIXES)}", "is no list of files")
        unusable = unusable_files([path]) if skips else {}
        takes = keep or keep_nothing(path)
        read = partial(_list_rows, column=columns[file_key], takes=takes, whole=keep is not None)
        make = partial(_entries_in, folder=path.parent, columns=columns, what=what, keep=takes, looks_near=not skips)
        for row in rows_of_files([path], unusable, read, make):
            entries = [_faulty(path, row)] if isinstance(row, Fault) else row
            for entry in entries:
                if entry.fault and not skips:
                    problem = row.message if isinstance(row, Fault) else f"{entry.origin}: {entry.fault}; {files.FIX}"
                    raise DataError(f"{problem}{OR_SKIP}")
                whole = whole or not entry.fault
                yield entry
            first = first or (row.message if isinstance(row, Fault) else "")
    if first and not whole:
        raise DataError(first)


def _list_rows(path: Path, column: str, takes: Keep, whole: bool) -> RowLines:
    lines = row_lines(path, keep={column: takes})
    return lines if whole or codec_of(path) is not None or not is_columnar(path) else islice(lines, LOOKED_AT)


def _faulty(path: Path, fault: Fault) -> Entry:
    """The entry that stands for a refused row of a list, or for the rest of the list."""
    if fault.origin == str(path):
        origin, reason = fault.name_and_reason()
    else:
        origin, reason = fault.origin, fault_of(fault.message, fault.origin)
    return Entry(path, "", origin, fault=reason)


def _entries_in(
    line: str, origin: str, size: int, folder: Path, columns: Mapping[str, str], what: str, keep: Keep, looks_near: bool
) -> list[Entry]:
    """Samples of a row; DataError where it names none. ``looks_near`` lets it name a folder of a missing file."""
    row = files.json_row(line, origin, *columns.values())
    files.require_columns(row, origin, {f"data.{name}": column for name, column in columns.items()})
    file_column, told_column = columns.values()
    if row.get("duration") is not None and str(row.get("offset") or 0).strip("0."):
        part = f"a part of its file (offset {row['offset']}, duration {row['duration']}), and files are read whole"
        raise DataError(f"{origin}: is {part}; cut the file, and leave out offset")
    try:
        named = find_file(row[file_column], keep)
    except BadSampleError as error:
        raise DataError(f"{origin}: {error}; {files.FIX}") from error
    if not isinstance(named, str) or not named or "\0" in named:
        raise DataError(f"{origin}: the file is {_shorten(repr(named))}, not a path; {files.FIX}")
    file = find_named(folder, named)
    if not os.path.isfile(file):  # Path.is_file raises for too long names
        fix = fix_of_missing(folder, named) if looks_near else files.FIX
        raise DataError(f"{origin}: there is no file {folder / _shorten(named)}; {fix}")
    seconds = _stated_seconds(row) if "audio_column" in columns else None
    return [
        Entry(file, label, origin, fault=fault, seconds=seconds)
        for label, fault in labels_of(row, told_column, origin, what)
    ]


def find_named(folder: Path, name: str) -> Path:
    """The file that a table in ``folder`` names: with Windows' separators, or without its suffix, where there is one
    such file alone."""
    file = folder / name
    if ("\\" not in name and file.suffix) or os.path.exists(file):
        return file
    plain = folder / name.replace("\\", "/")
    alike = [plain, *(Path(f"{plain}{suffix}") for suffix in _USUAL_SUFFIXES)]
    there = [path for path in alike if os.path.isfile(path)]
    return there[0] if len(there) == 1 else file


def fix_of_missing(folder: Path, name: str) -> str:
    """Fix of the error that ``folder`` has no file of this name: a folder near it that has such a file, if any."""
    for place in () if os.path.isabs(name) else (folder, folder.parent):
        with suppress(OSError), os.scandir(place) as content:
            near = sorted(entry.path for entry in islice(content, _MOST_NEAR) if entry.is_dir())
            for other in map(Path, near):
                if other != folder and os.path.isfile(find_named(other, name)):
                    return f"paths are seen from the table's folder: put the table into {other}"
    return files.FIX


def _stated_seconds(row: Mapping[str, Any]) -> float | None:
    """Seconds of sound that a row states, by its duration (NeMo) or by a start and an end; None without them."""
    spans = [("", "duration"), *_TIMES]
    for start, end in spans:
        try:
            seconds = float(row[end]) - (float(row[start]) if start else 0.0)
        except (KeyError, TypeError, ValueError):
            continue
        if seconds > 0:
            return seconds
    return None


def labels_of(row: Mapping[str, Any], column: str, origin: str, what: str) -> Iterator[tuple[str, str]]:
    """Labels of a row's picture or recording as (label, empty string); for an unusable row the reason comes second.

    A column of captions may hold a list of them. One of classes holds a list, or names between commas, semicolons or
    bars, which give one label: a JSON list of their names.
    """
    value = row[column]
    if what == CLASSES:
        yield _list_of_classes(value, column, origin)
        return
    several = value if what == CAPTION and isinstance(value, list) and value else [value]
    for single in several:
        try:
            yield label_of({column: single}, column, origin, what), ""
        except DataError as error:
            yield "", fault_of(error, origin)


def _list_of_classes(value: object, column: str, origin: str) -> tuple[str, str]:
    names = _names_in(value) if isinstance(value, str) else value
    if not isinstance(names, list):
        names = [names]
    try:
        if isinstance(value, str) and "," in value and any(";" in str(name) or "|" in str(name) for name in names):
            raise DataError(f"separates classes by commas and by other signs: {_shorten(value)!r}; give a JSON list")
        classes = {label_of({column: name}, column, origin) for name in names}
    except DataError as error:
        return "", fault_of(error, origin)
    return json.dumps(sorted(classes), ensure_ascii=False), ""


def _names_in(text: str) -> object:
    """Names of classes in a field: a list as JSON or Python writes it, or names between commas, semicolons or bars."""
    if PYTHON_LIST.fullmatch(text.strip()):
        return [quoted[1:-1] for quoted in re.findall(_QUOTED, text)]
    listed = nested_value(text)
    separator = "," if "," in text else "[;|]"
    return [name.strip() for name in re.split(separator, text)] if listed is text else listed


def _shorten(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."


def label_of(row: Mapping[str, Any], column: str, origin: str, what: str = "class") -> str:
    """Class of a row (or another ``what``), a name or a whole number; DataError for another type."""
    label = row[column]
    blank = isinstance(label, str) and (not label.strip() or (column == GOLD and label.strip() == "-"))
    if blank or not isinstance(label, str | int) or isinstance(label, bool):
        kind = "a name or a whole number" if what == "class" else "a text"
        problem = f"no {what}" if blank or label in (None, []) else f"{label!r} as its {what}, not {kind}"
        raise DataError(f"{origin}: has {problem}; {files.FIX}")
    files.check_unicode(str(label), origin)
    return str(label)


TRAIN, HELD_OUT = "train", ("validation", "test")
SPLITS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of split folders in Hugging Face's imagefolder."""


@dataclass(frozen=True)
class ClassFolders:
    """Reads folders whose files have one of these suffixes, lower case; ``what`` names the files in messages."""

    what: str
    suffixes: tuple[str, ...]

    def entries(self, pattern: str, key: str) -> Iterator[Entry]:
        """Yields the files of a folder of classes, in a fixed order; ConfigError if it is none."""
        root = expand_home(pattern)
        if pattern.startswith(DATA) or not root.is_dir():
            fix = f"give a folder that holds a folder of {self.what} for each class"
            raise ConfigError(key, pattern, fix, "is no folder here")
        classes = self.classes_in(root)
        if not classes:
            fix = f"put each class's {self.what} ({', '.join(self.suffixes)}) into a folder of its name below it"
            raise ConfigError(key, pattern, fix, f"holds no folder of {self.what}")
        for folder, paths in classes.items():
            yield from (Entry(path, folder, str(path)) for path in paths)

    def classes_in(self, root: Path) -> dict[str, list[Path]]:
        """Folders of classes below ``root`` by name, with the files below each; skips hidden ones."""
        read = {name: list(filter(self._reads, paths)) for name, paths in _folders_in(root)}
        return {name: paths for name, paths in read.items() if paths}

    def notes(self, data: DataConfig) -> list[str]:
        """Notices of split folders that are used, and of files that have no class or another suffix."""
        paths, held_out = self.with_splits(data)
        notes = list[str]()
        if (paths, held_out) != (data.paths, data.validation_paths):
            folders = (", ".join(several) or "no folder" for several in (paths, held_out))
            notes.append("the {} in {} are trained on, those in {} held out".format(self.what, *folders))
        roots = [expand_home(root) for root in (*paths, *held_out)]
        visible = (path for root in roots for path in sorted(root.iterdir()) if not is_no_data(path.name))
        if loose := [path for path in visible if self._reads(path) and path.is_file()]:
            notes.append(f"{len(loose)} {self.what} in no folder of a class are left out: {_first(loose)}")
        below = (path for root in roots for _, paths in _folders_in(root) for path in paths)
        if others := [path for path in below if not self._reads(path)]:
            problem = f"have no suffix of {self.what} ({', '.join(self.suffixes)}) and are left out"
            notes.append(f"{len(others)} files in folders of classes {problem}: {_first(others)}")
        return notes

    def _reads(self, path: Path) -> bool:
        return path.suffix.lower() in self.suffixes

    def with_splits(self, data: DataConfig) -> tuple[list[str], list[str]]:
        """Training and held-out paths, folders of splits replaced by these; ConfigError for splits next to classes."""
        trained, held_out = list[str](), list[str]()
        for key, patterns in (("data.paths", data.paths), ("data.validation_paths", data.validation_paths)):
            for pattern in patterns:
                splits = self._splits_in(pattern, key)
                first_held = next((splits[kind] for kind in HELD_OUT if kind in splits), None)
                if key == "data.paths":
                    trained.append(splits.get(TRAIN, pattern))
                    if first_held is not None and not data.validation_paths and data.validation_fraction > 0:
                        held_out.append(first_held)
                else:
                    held_out.append(first_held or pattern)
        return trained, held_out

    def _splits_in(self, pattern: str, key: str) -> dict[str, str]:
        """Splits that a folder has instead of classes, by kind."""
        root = expand_home(pattern)
        if not root.is_dir():
            return {}
        folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir() and not is_no_data(folder.name)]
        kinds = {kind: folder for folder in folders for kind, names in SPLITS.items() if folder.name.lower() in names}
        if TRAIN not in kinds:
            return {}
        others = [folder for folder in folders if folder not in kinds.values() and self._holds_files(folder)]
        if not others:
            return {kind: str(folder) for kind, folder in kinds.items()}
        if len(kinds) == 1:
            return {}  # a class of trains
        fix = "name the splits by data.paths and data.validation_paths"
        names = " and ".join(folder.name for folder in kinds.values())
        raise ConfigError(key, pattern, fix, f"holds the splits {names} and also {others[0].name}")

    def _holds_files(self, folder: Path) -> bool:
        return any(map(self._reads, files_below(folder)))


def _folders_in(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """The folders in ``root`` by name, with all files below each."""
    stat = root.stat()
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and not is_no_data(folder.name):
            # A link to a parent folder would put every file into its class.
            yield folder.name, sorted(files_below(folder, walked={(stat.st_dev, stat.st_ino)}))


def _first(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more
