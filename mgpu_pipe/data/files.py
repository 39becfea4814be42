"""Local data files: globs, strict UTF-8, lines, and rows as JSON; text also compressed."""

from __future__ import annotations

import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mgpu_pipe.config.hub import DATA, data_files
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.data.compressed import HEAD, binary_form, bytes_read, codec_of, open_text, zip_members
from mgpu_pipe.data.fingerprint import READABLE, Fingerprint
from mgpu_pipe.errors import ConfigError, DataError

NO_DATA = ("__MACOSX", "@eaDir", "__pycache__", "Thumbs.db", "desktop.ini")
"""Folders and files that programs leave behind, in addition to hidden ones."""


def files_below(folder: Path, hidden: bool = False, walked: set[tuple[int, int]] | None = None) -> Iterator[Path]:
    """Yields the files below a folder; it walks each folder once, by a path without links if there is one.

    Args:
        hidden: include hidden files and what programs leave behind (:data:`NO_DATA`).
        walked: (device, inode) of folders to skip; walked folders are added.
    """
    walked = set() if walked is None else walked
    folders, links = [folder], list[Path]()
    while folders or links:
        current = folders.pop() if folders else links.pop(0)
        try:
            stat = current.stat()
            if (stat.st_dev, stat.st_ino) in walked:
                continue
            walked.add((stat.st_dev, stat.st_ino))
            with os.scandir(current) as listing:
                entries = sorted(listing, key=lambda entry: entry.name, reverse=True)
        except OSError:
            continue
        for entry in entries:
            if not hidden and is_no_data(entry.name):
                continue
            path = current / entry.name
            if os.path.isfile(path):
                yield path
            elif os.path.isdir(path):
                (links if entry.is_symlink() else folders).append(path)


def is_no_data(name: str) -> bool:
    """Whether a name is hidden, or one that programs leave behind."""
    return name.startswith(".") or name in NO_DATA


def match_glob(pattern: str) -> list[str]:
    """Sorted matches of a glob; ``**`` walks each folder once, even with several links to it."""
    if "**" not in pattern.split(os.sep):
        return sorted(glob.glob(pattern))
    parts = pattern.split(os.sep)
    depth = parts.index("**")
    first, wanted = os.sep.join(parts[:depth]), parts[depth:]
    matches = set[str]()
    for base in glob.glob(first) if first else [os.sep if depth else ""]:
        for path in files_below(Path(base), any(part.startswith(".") for part in wanted)):
            name = os.path.relpath(path, base or os.curdir)
            if _fits(name.split(os.sep), wanted):
                matches.add(os.path.join(base, name))
    return sorted(matches)


def _fits(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a glob."""
    if not wanted:
        return not names
    if wanted[0] == "**":
        if len(wanted) == 1 and len(names) == 1:
            return not names[0].startswith(".")
        return _fits(names, wanted[1:]) or (bool(names) and not names[0].startswith(".") and _fits(names[1:], wanted))
    if not names or (names[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatchcase(names[0], wanted[0]) and _fits(names[1:], wanted[1:])


_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",  # tables of character names: a megabyte unlike text
}
FIX = "correct or remove it"
TOKEN_IDS = "input_ids"
"""Column of token ids in rows that another program tokenised."""
LONGEST_LINE = 256 << 20
"""Largest line in bytes: tokenising holds several copies of it."""
LONGEST_NAME = 40
"""Characters of the name of a column; a longer one in the first line of a table is a text."""
_TABLE_ROW = re.compile(r"\.[ct]sv(\.\w+)?:\d+$", re.IGNORECASE)
LARGEST_TEXT = 4 << 30
"""Largest compressed file that is one document, in bytes."""
_BYTES_A_READ = 1 << 18
"""Bytes of a text that are read together."""
REPLACE = "replace the file, or leave it out of the data's paths"


def expand_paths(patterns: Sequence[str], key: str) -> list[Path]:
    """Lists the files that ``patterns`` (paths or globs, with ``**``) name: sorted within a pattern, each file once.

    The first spelling of a path stays. It walks each linked folder once. It downloads files of a Hub data set at a
    commit unless the cache of this machine has them.

    Raises:
        ConfigError: there is no pattern, or a pattern matches no file.
    """
    if not patterns:
        raise ConfigError(key, "[]", "give at least one file or glob, e.g. 'corpus/**/*.txt'")
    paths: dict[str, Path] = {}
    for pattern in patterns:
        if pattern.startswith(DATA):
            for path in data_files(pattern, key):
                paths.setdefault(_place_of(path), path)
            continue
        text = os.path.expanduser(pattern)
        # A file's name may itself have brackets or stars.
        names = [text] if os.path.exists(text) else match_glob(text)
        files = [Path(name) for name in names if os.path.isfile(name)]
        if not files:
            if names and all(os.path.isdir(name) for name in names):
                raise ConfigError(key, pattern, f"name the files, e.g. '{pattern.rstrip('/')}/**/*'", "is a folder")
            raise ConfigError(key, pattern, _instead_of(text), "matches no file")
        for path in files:
            paths.setdefault(_place_of(path), path)
    return list(paths.values())


def _place_of(path: Path) -> str:
    """One spelling of a file's path, whose links stay."""
    place = os.path.abspath(path)
    # After a link, ``..`` leads elsewhere than the spelling says.
    is_same = ".." not in path.parts or (os.path.exists(place) and os.path.samefile(path, place))
    return place if is_same else os.path.join(os.getcwd(), path)


def _instead_of(path: str) -> str:
    """The fix for a path that does not exist."""
    if "://" in path:
        return f"copy the files to this machine, or name a data set on the Hub, {DATA}datasets/<org>/<name>/<file>"
    folder, name = os.path.split(path)
    with suppress(OSError):
        if close := nearest(name, os.listdir(folder or "."), cutoff=0.75):
            return f"did you mean {os.path.join(folder, close)}?"
    return "give a file or a glob that exists (seen from the working directory)"


def stdlib_files() -> list[Path]:
    """Sources of the running Python's library, without tests and installed packages, sorted by relative path."""
    check_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    return [root / name for name in sorted(os.path.relpath(name, root) for name in _stdlib_sources(root))]


def check_stdlib() -> None:
    """Raises DataError where the running Python has no library sources."""
    root = Path(sysconfig.get_path("stdlib"))
    if not any(_stdlib_sources(root)):
        raise DataError(f"data.source=stdlib_text: {root} holds no library sources; use data.source=text_files")


def _stdlib_sources(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in _LEFT_OUT and not n.startswith("config-")]
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if os.path.isfile(path) and os.path.getsize(path))


def read_parts(path: Path, expected: Fingerprint | None = None, member: str | None = None) -> Iterator[bytes]:
    """Yields the unpacked content of ``path``, or a zip's ``member``; DataError if unreadable, too large or not
    ``expected``."""
    size = 0
    try:
        with open_text(path, expected, member) as file:
            while part := file.read(_BYTES_A_READ):
                size += len(part)
                if codec_of(path) is not None and size > LARGEST_TEXT:
                    raise DataError(f"{path}: unpacks to more than {LARGEST_TEXT >> 30} GiB; split it into documents")
                yield part
    except OSError as error:
        raise unreadable(path, str(path), error) from error


def read_bytes(path: Path, expected: Fingerprint | None = None) -> bytes:
    """Returns the content of ``path``; raises like :func:`read_parts`."""
    return b"".join(read_parts(path, expected))


def members_of(path: Path, expected: Fingerprint | None = None) -> list[str | None]:
    """Names of the files in a zip file, None for others; DataError if it cannot be read, or holds none."""
    if codec_of(path) != "zip":
        return [None]
    try:
        names = zip_members(path, expected)
    except OSError as error:
        raise unreadable(path, str(path), error) from error
    if not names:
        raise DataError(f"{path}: holds no files; remove it from the data's paths")
    return [*names]


def unreadable(path: Path, where: str, error: OSError) -> DataError:
    """Builds the error of a file that cannot be read or unpacked."""
    codec = codec_of(path)
    if codec is None or error.strerror:
        return DataError(f"{path}: cannot be read: {error.strerror}; {READABLE}")
    return DataError(f"{where}: is not a whole {codec} file: {error}; {REPLACE}")


def decode(raw: bytes, where: str, offset: int = 0, head: bytes | None = None) -> str:
    """Decodes ``raw`` as strict UTF-8.

    Args:
        offset: of ``raw`` in its file.
        head: beginning of the file; None where ``raw`` is the beginning.

    Raises:
        DataError: not UTF-8; names ``where``, and the file's format or the offset of the first bad byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error, where, offset, raw[:HEAD] if head is None else head) from error


def not_utf8(error: UnicodeDecodeError, where: str, offset: int, head: bytes) -> DataError:
    """Builds the error of bytes that are not UTF-8, which start at ``offset`` of a file that begins with ``head``."""
    bad, position = error.object[error.start], offset + error.start
    advice = "convert it, e.g. with iconv -t UTF-8"
    return other_format(head, where) or DataError(
        f"{where}: is not UTF-8 (byte 0x{bad:02x} at offset {position}); {advice}"
    )


def other_format(head: bytes, where: str) -> DataError | None:
    """Builds the error of a file whose first :data:`HEAD` bytes are of another format than text; None for text."""
    form = binary_form(head)
    return DataError(f"{where}: is {form[0]}, not text; {form[1]}") if form else None


def decode_row(raw: bytes, where: str, offset: int, head: bytes) -> str:
    """Decodes like :func:`decode`; :class:`BrokenRow` for bytes that are not UTF-8, DataError for a file that is no
    text."""
    try:
        return decode(raw, where, offset, head)
    except DataError as error:
        if binary_form(head):
            raise
        return BrokenRow(str(error).removeprefix(f"{where}: "))


def check_unicode(text: str, origin: str) -> None:
    """Refuses a string with half of a surrogate pair, which JSON can write; DataError names ``origin``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is not text; {FIX}"
        ) from error


def read_lines(path: Path, expected: Fingerprint | None = None) -> Iterator[tuple[str, str, int]]:
    """Yields the nonblank lines of a text file, unpacked: ``(line, "file:number", bytes of the file)``.

    A line that is not UTF-8 is a :class:`BrokenRow`.

    Raises:
        DataError: the file cannot be read, is empty, not text or not ``expected``, or a line is too long.
    """
    offset, rows, number, before, head = 0, 0, 0, 0, b""
    try:
        with open_text(path, expected) as file:
            while raw := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{path}:{number}: is longer than {LONGEST_LINE >> 20} MiB; {FIX}, or split it into documents"
                    )
                head = head if len(head) >= HEAD else head + raw[:HEAD]
                if number == 1 and b"\0" in head[:4] and (wide := other_format(head, str(path))):
                    raise wide  # UTF-16 without its mark is UTF-8 with many NULs
                line = decode_row(raw, f"{path}:{number}", offset, head)
                offset += len(raw)
                if number == 1:
                    line = line if isinstance(line, BrokenRow) else line.removeprefix("\ufeff")
                if line.strip():
                    rows += 1
                    read = bytes_read(file)
                    size, before = (len(raw), 0) if read is None else (read - before, read)
                    yield line, f"{path}:{number}", size
    except OSError as error:
        raise unreadable(path, f"{path}:{number + 1}", error) from error
    if not rows:
        raise DataError(f"{path}: holds blank lines only; remove it from the data's paths")


Content = TypeVar("Content")


class BrokenRow(str):
    """Error message that replaces a row's content; :func:`whole_row` raises it."""


def whole_row(content: Content, origin: str) -> Content:
    """Returns the content of a row; DataError for a :class:`BrokenRow`."""
    if isinstance(content, BrokenRow):
        raise DataError(f"{origin}: {content}")
    return content


def json_row(line: str, origin: str, *columns: str) -> dict[str, Any]:
    """Parses a row, one line of JSON, to a mapping.

    Args:
        columns: to resolve; ``meta.text`` may also be the field ``text`` of the object ``meta``.

    Raises:
        DataError: broken JSON or not an object; names file and line.
    """
    try:
        row = json.loads(whole_row(line, origin), parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        if origin.endswith(":1") and line.lstrip()[:1] not in ("{", "[", '"'):
            fix = "write an object a line, let the name of a table end in .csv or .tsv, or choose another source"
            raise DataError(f"{origin}: is no JSON; {fix} (mgpu-pipe ls data)") from error
        raise DataError(
            f"{origin}: is not valid JSON: {error.msg} (character {error.pos + 1} of the line); {FIX}"
        ) from error
    except ValueError as error:  # a number with too many digits, NaN, Infinity
        raise DataError(f"{origin}: is not valid JSON: {error}; {FIX}") from error
    except RecursionError as error:
        raise DataError(f"{origin}: is JSON nested too deeply; {FIX}") from error
    if not isinstance(row, dict):
        raise DataError(f"{origin}: is a JSON {type(row).__name__}, not an object with columns; {FIX}")
    for column in columns:
        value: Any = row
        for part in () if column in row else column.split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            row.setdefault(column, value)
    return row


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def require_columns(row: Mapping[str, Any], origin: str, columns: Mapping[str, str]) -> None:
    """Raises DataError where a row lacks one of the columns, which are listed by their keys."""
    for key, column in columns.items():
        if column not in row:
            raise missing_column(origin, key, column, list(row))


_COLUMNS_OF_EXPORTS = {
    frozenset({"images", "annotations"}): "it is COCO's: write a table with a row for each picture, its path and label",
    frozenset({"data", "annotations"}): "it is Label Studio's: export JSON-MIN or CSV, and name its columns",
    frozenset(
        {"recording", "supervisions"}
    ): "it is Lhotse's: write a table with a row for each recording and its text",
}
"""Columns that tell another program's export, and what to do."""


def missing_column(where: str, key: str, column: str, there: Sequence[str]) -> DataError:
    """Builds the error of a file without the configured column."""
    for columns, advice in _COLUMNS_OF_EXPORTS.items():
        if columns <= {*there}:
            return DataError(f"{where}: has no column '{column}'; {advice}")
    if len(there) == 1 and (other := next((mark for mark in ";|" if mark in there[0]), None)):
        fix = f"its columns are set apart by {other!r}: write commas"
    elif _TABLE_ROW.search(where) and any(
        len(name) > LONGEST_NAME or name.isdecimal() or "|" in name for name in there
    ):
        return DataError(f"{where}: the first line of this table names no columns; put a line of names above it")
    elif TOKEN_IDS in there:
        fix = f"rows of token ids ({TOKEN_IDS}) are not read: give their texts, or write a data source that yields ids"
    else:
        fix = f"set {key} to one that is there: {', '.join(there) or 'none'}"
    return DataError(f"{where}: has no column '{column}'; {fix}")
