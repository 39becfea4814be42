"""Reads files that somebody else may have made: plain files of a bounded size, inside the folder that was named.

A run's folder or a model's may come from anywhere. A pipe in it would wait for ever, a device would never end, a
symbolic link leads to another place, and a file may be larger than memory. None of these is read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from mgpu_pipe.errors import BadInputError

MAX_CONFIG_BYTES = 4 << 20
"""Of a YAML configuration; a real one has some kilobytes, or a long list of files."""
MAX_JSON_BYTES = 64 << 20
"""Of the JSON files beside a run or a model; the largest real ones are tokenizers, of some 35 MB."""
MAX_TABLE_BYTES = 512 << 20
"""Of ``metrics.csv``: some millions of rows."""
MOST_EVENTS, DEEPEST = 400_000, 64
"""Values and brackets in a YAML file, and how deep they are nested."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NotPlainError(BadInputError):
    """A file that is not read, whatever is in it: a link out of its folder, a pipe, a device, or far too large."""


def read_bytes(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """The content of a plain file.

    Args:
        limit: largest size in bytes that can be right.
        inside: the folder that the file, links followed, has to lie in; the file's own where not given.

    Raises:
        NotPlainError: it is no plain file, leads out of ``inside``, or is larger.
        OSError: it is missing or cannot be read.
    """
    with _opened(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise NotPlainError(f"{path}: has {size:,} bytes, more than the {limit:,} that can be right")
        return file.read(min(limit, size + 1))  # not of the limit, which would be allocated each time


def read_end(path: Path, most: int) -> bytes:
    """The last whole lines of a plain file in its own folder, at most ``most`` bytes of them.

    Raises:
        NotPlainError, OSError: as of :func:`read_bytes`.
    """
    with _opened(path, None) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        content = file.read(most)
    return content.partition(b"\n")[2] if start else content


def _opened(path: Path, inside: Path | None) -> BinaryIO:
    check_plain(path, inside)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _no_plain_file(path)
    return file


def check_plain(path: Path, inside: Path | None = None) -> None:
    """Refuse anything but a plain file in its folder; a missing file is left to who opens it.

    Raises:
        NotPlainError: a pipe, socket, device or folder, or a link that leads out of ``inside``.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return
    if stat.S_ISLNK(status.st_mode):
        root, target = Path(os.path.realpath(inside or path.parent)), Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in (root, *_hub_blobs(root))):
            raise NotPlainError(f"{path}: is a symbolic link out of its folder; put a copy of the file there")
        try:
            status = os.stat(path)
        except OSError:
            return
    if not stat.S_ISREG(status.st_mode):
        raise _no_plain_file(path)


def check_folder(folder: Path, largest_json: int = MAX_JSON_BYTES, depth: int = 2) -> None:
    """Refuse a folder that a library is about to read by itself, unless all in it is plain.

    Raises:
        NotPlainError: names the first thing that is not.
    """
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if depth:
                check_folder(path, largest_json, depth - 1)
            continue
        check_plain(path, folder)
        if path.suffix in (".json", ".jinja", ".txt") and path.exists() and path.stat().st_size > largest_json:
            raise NotPlainError(
                f"{path}: has {path.stat().st_size:,} bytes, more than the {largest_json:,} that can be right"
            )


def parse_json(data: bytes | str, where: Path | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None


def parse_yaml(data: bytes | str) -> Any:
    """The value of a YAML text, looked through before anything of it is built.

    Raises:
        yaml.YAMLError: it is not YAML, repeats parts of itself by aliases, or is too large or nested too deeply.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    check_yaml(text, aliases=False)
    try:
        return yaml.load(text, _Loader)
    except (ValueError, OverflowError) as error:  # a date that does not exist, a number of too many digits
        raise yaml.YAMLError(str(error)) from error


def check_yaml(text: str, aliases: bool) -> None:
    """Look through a YAML text without building anything of it.

    Args:
        aliases: whether it may repeat parts of itself; what is repeated counts each time.

    Raises:
        yaml.YAMLError: it is not YAML, repeats parts though it may not, or is too large or nested too deeply.
    """
    entries = 0
    begun: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    events: Iterator[Any] = yaml.parse(text, _Loader)
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise yaml.YAMLError("it repeats parts of itself by aliases (*name)")
            entries += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, entries))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = entries - before
        entries += 1
        if len(begun) > DEEPEST or entries > MOST_EVENTS:
            raise yaml.YAMLError("it is nested too deeply" if len(begun) > DEEPEST else "it has far too many entries")


def _hub_blobs(root: Path) -> list[Path]:
    """Where the links of a folder of the Hugging Face cache lead: ``models--x/snapshots/y`` to ``models--x/blobs``."""
    return [root.parents[1] / "blobs"] if root.parent.name == "snapshots" else []


def _no_plain_file(path: Path) -> NotPlainError:
    return NotPlainError(f"{path}: is not a plain file; a run or a model holds plain files only")
