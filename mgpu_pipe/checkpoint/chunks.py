"""SHA-256 of every 4 MiB chunk of a file, computed while writing and checked while reading."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.errors import CheckpointError

CHUNK_BYTES = 4 * 1024 * 1024
MAX_LAG = 4
"""Most chunks that the hashing threads lag behind the stream."""


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and the SHA-256 of each of its chunks; the last chunk may be short."""

    size: int
    sha256: tuple[str, ...]


class ChunkHasher:
    """Hashes a stream of bytes chunk by chunk.

    Args:
        threads: number of hashing threads; 0 hashes in the caller's thread. With threads, the data of :meth:`update`
            must not change until :meth:`record` returns.
    """

    def __init__(self, threads: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-hash") if threads else None
        self._finished: list[str | Future[str]] = []
        self._current: list[files.Buffer] = []
        self._digest = hashlib.sha256()
        self._size = 0

    def update(self, data: files.Buffer) -> None:
        rest = memoryview(data)
        while rest.nbytes:
            space = CHUNK_BYTES - self._size % CHUNK_BYTES
            part, rest = rest[:space], rest[space:]
            self._size += part.nbytes
            is_full = self._size % CHUNK_BYTES == 0
            if self._pool is None:
                self._digest.update(part)
            else:  # the end of a tensor is copied, else it would keep the whole one until the next has come
                self._current.append(part if is_full else bytes(part))
            if is_full:
                self._end_chunk()

    def record(self) -> FileRecord:
        """The record of all data so far; ends the threads."""
        if self._size % CHUNK_BYTES:
            self._end_chunk()
        hashes = tuple(digest if isinstance(digest, str) else digest.result() for digest in self._finished)
        self.close()
        return FileRecord(self._size, hashes)

    def close(self) -> None:
        """End the threads; may be called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _end_chunk(self) -> None:
        if self._pool is None:
            self._finished.append(self._digest.hexdigest())
            self._digest = hashlib.sha256()
            return
        lagging = len(self._finished) - MAX_LAG
        if lagging >= 0:  # unhashed chunks stay in memory, so wait for the oldest
            oldest = self._finished[lagging]
            assert not isinstance(oldest, str)
            oldest.result()
        self._finished.append(self._pool.submit(_hash_of, self._current))
        self._current = []


def _hash_of(parts: Sequence[files.Buffer]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def record_of(data: files.Buffer) -> FileRecord:
    """The record of a file that holds ``data``."""
    hasher = ChunkHasher()
    hasher.update(data)
    return hasher.record()


class ChunkedFile:
    """A file for reading ranges; the first read of a chunk checks its hash.

    Args:
        path: the file.
        expected: hashes to check reads against; None checks nothing.

    Raises:
        CheckpointError: the file is missing, no plain file, or of another size than ``expected``.
    """

    def __init__(self, path: Path, expected: FileRecord | None) -> None:
        self.path = path
        self.bytes_read = 0
        """Bytes read from the file system so far."""
        self._expected = expected
        self._descriptor, self.size = files.open_regular(path)
        self._checked: set[int] = set()
        self._cached_index = -1
        self._cached = bytearray()
        if expected is not None and self.size != expected.size:
            self.close()
            raise CheckpointError(size_fault(path, self.size, expected))

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) from ``offset`` on; CheckpointError beyond the file, or names a bad
        chunk."""
        end = offset + target.nbytes
        if offset < 0 or end > self.size:
            raise CheckpointError(f"{self.path}: bytes {offset} to {end} are outside the file of {self.size} bytes")
        if self._expected is None:
            self._fetch(offset, target)
            return
        position = offset
        while position < end:
            index = position // CHUNK_BYTES
            stop = min(end, (index + 1) * CHUNK_BYTES)
            self._read_within_chunk(index, position, target[position - offset : stop - offset])
            position = stop

    def check(self) -> None:
        """Read and check the whole file."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for start in range(0, self.size, CHUNK_BYTES):
            self.read_into(start, buffer[: min(CHUNK_BYTES, self.size - start)])

    def _read_within_chunk(self, index: int, position: int, target: memoryview) -> None:
        start = index * CHUNK_BYTES
        size = min(CHUNK_BYTES, self.size - start)
        if index == self._cached_index:
            target[:] = memoryview(self._cached)[position - start : position - start + target.nbytes]
        elif index in self._checked:
            self._fetch(position, target)
        elif target.nbytes == size:
            self._fetch(start, target)
            self._check_hash(index, target)
        else:
            # Cache the chunk, because the next read is usually in the same one.
            self._cached_index, self._cached = -1, bytearray(size)
            self._fetch(start, memoryview(self._cached))
            self._check_hash(index, self._cached)
            self._cached_index = index
            target[:] = memoryview(self._cached)[position - start : position - start + target.nbytes]

    def _fetch(self, offset: int, target: memoryview) -> None:
        files.read_into(self._descriptor, offset, target, self.path)
        self.bytes_read += target.nbytes

    def _check_hash(self, index: int, data: files.Buffer) -> None:
        assert self._expected is not None
        if hashlib.sha256(data).hexdigest() != self._expected.sha256[index]:
            raise CheckpointError(damage(self.path, index, len(self._expected.sha256)))
        self._checked.add(index)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ChunkedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_bytes(data: files.Buffer, expected: FileRecord, path: Path) -> None:
    """Check a small file that was read whole; CheckpointError names the file and the chunk that differs."""
    actual = record_of(data)
    if actual.size != expected.size:
        raise CheckpointError(size_fault(path, actual.size, expected))
    for index, (got, want) in enumerate(zip(actual.sha256, expected.sha256, strict=True)):
        if got != want:
            raise CheckpointError(damage(path, index, len(expected.sha256)))


def size_fault(path: Path, size: int, expected: FileRecord) -> str:
    return f"{path}: has {size} bytes, the manifest says {expected.size}: the file is truncated or of another save"


def damage(path: Path, index: int, count: int) -> str:
    start = index * CHUNK_BYTES
    return f"{path}: chunk {index} of {count} (from byte {start}) is damaged or of another save: its SHA-256 differs"
