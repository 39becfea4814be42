"""A sweep's points as one file each, for network file systems, where SQLite's locks cannot be relied on.

A point's file is replaced whole. Who wants to change it first makes the file of its next version, which the server
lets one process make; a process that died in between is overtaken.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.config.plain_files import MAX_JSON_BYTES, NotPlainError, parse_json, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.errors import BadInputError

STALE_S = 60.0
"""A change takes milliseconds: one that began so long ago was not finished."""
LOOK_S = 0.01


class FilePoints:
    """The points' files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[dict[str, Any]]:
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit())
        return [self._read(number) for number in numbers]

    def add(self, records: Sequence[dict[str, Any]]) -> bool:
        self._folder.mkdir(exist_ok=True)
        taken = self._folder / "adding.taken"
        while not _made(taken):
            _outwait(taken, lambda: False)
        try:
            if any(self._path(record["number"]).exists() for record in records):
                return False
            for record in records:
                replace_file(self._path(record["number"]), json.dumps(record), flush=True)
        finally:
            taken.unlink(missing_ok=True)
        return True

    def change(self, number: int, expected: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
        while True:
            record = self._read(number)
            if any(record.get(key) != value for key, value in expected.items()):
                return False
            version = record["version"] + 1
            taken = self._folder / f"{number}.{version}.taken"
            if not _made(taken):
                _outwait(taken, lambda: self._read(number)["version"] >= version)  # noqa: B023
                continue
            if self._read(number)["version"] >= version:  # another wrote that version, and the next, since we read
                taken.unlink(missing_ok=True)
                continue
            try:
                replace_file(self._path(number), json.dumps({**record, **changes, "version": version}), flush=True)
            except BaseException:  # a full disk: whoever makes room need not outwait this
                taken.unlink(missing_ok=True)
                raise
            (self._folder / f"{number}.{version - 1}.taken").unlink(missing_ok=True)
            return True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"

    def _read(self, number: int) -> dict[str, Any]:
        path = self._path(number)
        try:
            record = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
        except (OSError, ValueError, NotPlainError) as error:
            raise BadInputError(f"{path}: the sweep's record of a point cannot be read ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("version"), int):
            raise BadInputError(f"{path}: not a sweep's record of a point; remove it, and sweeps extend adds the point")
        return record


def _outwait(taken: Path, written: Callable[[], bool]) -> None:
    """Return when the change was written or its file is gone; one that stays for long is removed.

    Looks are counted, for a clock goes on while a server hangs; and another file of that name is another process's.
    """
    first = _which(taken)
    for _ in range(round(STALE_S / LOOK_S)):
        if first is None or written() or _which(taken) != first:
            return
        time.sleep(LOOK_S)
    if _which(taken) == first:
        taken.unlink(missing_ok=True)


def _which(path: Path) -> tuple[int, int] | None:
    """What tells this file from a later one of the same name; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _made(path: Path) -> bool:
    """Make a file, which of several processes one alone does."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True
