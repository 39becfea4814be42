"""Content hashes of data files, and reads that verify every byte against them.

The cache stores data under the hash of its source. A file that changes after hashing, or during a read, raises an
error; the next start hashes it again.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mgpu_pipe.data.cache import (
    BLOCK_BYTES,
    Progress,
    block_hash,
    digest_of,
    hash_blocks,
    no_progress,
    read_block,
    read_hashed,
    write_hashed,
)
from mgpu_pipe.errors import DataError

# A file changed this shortly before it was hashed may change again within one tick of the file system's clock.
_RACY_NS = 2_000_000_000
READABLE = "make it readable, or leave it out of the data's paths"


@dataclass(frozen=True)
class Fingerprint:
    """A file's size in bytes and the SHA-256 of each of its blocks of 4 MiB; the last may be short."""

    size: int
    blocks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Identity of the content."""
        return self.blocks[0] if len(self.blocks) == 1 else hashlib.sha256("".join(self.blocks).encode()).hexdigest()


class ChangedFileError(DataError):
    """A data file changed since it was hashed."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: changed while it was being prepared; start again when nothing writes to it")


def check_readable(path: Path) -> int:
    """Returns the size of ``path`` in bytes; DataError if it is missing, unreadable or empty."""
    try:
        with open(path, "rb"):
            size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {READABLE}") from error
    if size == 0:
        raise DataError(f"{path}: is empty; remove it from the data's paths")
    return size


def fingerprints(paths: Sequence[Path], cache: Path, progress: Progress = no_progress) -> dict[Path, Fingerprint]:
    """Fingerprints files; those of equal size, times (also of the change) and inode are not read again."""
    index_file = _index_file(paths, cache)
    try:
        known = read_hashed(index_file)
    except (OSError, ValueError):
        known = {}
    total = sum(check_readable(path) for path in paths)
    done, fresh, result = 0, {}, {}
    for path in paths:
        now = time.time_ns()
        try:
            stat = path.stat()
            state = _state(stat)
            entry = known.get(str(path))
            racy = entry is None or entry["seen_ns"] - stat.st_ctime_ns < _RACY_NS
            if entry is None or racy or entry["state"] != state or "blocks" not in entry:
                entry = {"state": state, "seen_ns": now, "blocks": hash_blocks(path)}
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; {READABLE}") from error
        fresh[str(path)] = entry
        result[path] = Fingerprint(stat.st_size, tuple(entry["blocks"]))
        done += stat.st_size
        progress("hash", min(done, total), total)
    if fresh != known:
        index_file.parent.mkdir(parents=True, exist_ok=True)
        write_hashed(index_file, fresh)
    return result


def forget(paths: Sequence[Path], cache: Path) -> None:
    """Makes :func:`fingerprints` read these files again."""
    _index_file(paths, cache).unlink(missing_ok=True)


def _index_file(paths: Sequence[Path], cache: Path) -> Path:
    return cache / "fingerprints" / f"{digest_of([os.path.abspath(path) for path in paths])}.json"


def open_data(path: Path, expected: Fingerprint | None = None) -> IO[bytes]:
    """Opens a data file, or raises DataError; checks each byte read against ``expected`` (ChangedFileError, also
    later)."""
    check_readable(path)
    try:
        return open(path, "rb") if expected is None else io.BufferedReader(_CheckedFile(path, expected), 1 << 20)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {READABLE}") from error


_VERIFIED: set[int] = set()
"""Hashes of verified parts of files: path, offset, expected content and the file's state."""


def read_part(path: Path, expected: Fingerprint, offset: int | None = None) -> bytes:
    """Reads a data file from ``offset`` on, or all of it; raises like :func:`open_data`.

    Content that this process has read is not hashed again while the file's size, times and inode stay the same.
    """
    now = time.time_ns()
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            state = _state(stat)
            file.seek(offset or 0)
            raw = file.read(-1 if offset is None else expected.size)
            same = _state(os.fstat(file.fileno())) == state
    except OSError:
        check_readable(path)
        raise
    part = hash((str(path), offset, expected, *state))
    if same and part in _VERIFIED:
        return raw
    blocks = tuple(block_hash(raw[start : start + BLOCK_BYTES]) for start in range(0, len(raw), BLOCK_BYTES))
    if Fingerprint(len(raw), blocks) != expected:
        raise ChangedFileError(path)
    if same and now - stat.st_ctime_ns >= _RACY_NS:
        _VERIFIED.add(part)
    return raw


def _state(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class _CheckedFile(io.RawIOBase):
    """A file that returns a block only if it has the expected hash."""

    def __init__(self, path: Path, expected: Fingerprint) -> None:
        self._path, self._expected = path, expected
        self._position, self._block_index, self._block = 0, -1, memoryview(b"")
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._check(os.fstat(self._descriptor).st_size == expected.size)

    def _check(self, same: bool) -> None:
        if not same:
            raise ChangedFileError(self._path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._expected.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # a writable buffer, which typing cannot say
        if self._position >= self._expected.size:
            self._check(os.fstat(self._descriptor).st_size == self._expected.size)
            return 0
        index, start = divmod(self._position, BLOCK_BYTES)
        if index != self._block_index:
            block = read_block(self._descriptor, index)
            self._check(block_hash(block) == self._expected.blocks[index])
            self._block_index, self._block = index, memoryview(block)
        part = self._block[start : start + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
