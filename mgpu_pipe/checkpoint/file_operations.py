"""Every file system operation of a checkpoint, one function each.

The rest of the package calls these through the module (``files.rename(...)``), so that tests can record, replay or fail
the operations of a save in one place. An ``OSError`` always carries its path.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_pipe.errors import CheckpointError

Buffer = bytes | bytearray | memoryview


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an ``OSError`` of a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def create(path: Path) -> int:
    """Open a new file for writing; fails if the name exists, even as a symbolic link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: Buffer) -> None:
    """Append all of ``data``; one system call may write less (at most 2 GiB, or the rest of a full disk)."""
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]


def begin_flush(descriptor: int, offset: int, size: int) -> None:
    """Start to flush a new range, so that :func:`sync` has little left; nothing depends on this advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    """Flush a file's data to the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file that other code wrote to the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (created, renamed and removed names) to the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, a free name."""
    os.rename(source, target)


def make_folder(path: Path) -> None:
    """Make one new folder."""
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """Make ``path`` and missing parents, each flushed; FileExistsError if it exists, perhaps by another process."""
    # There is no check for ``path`` before, so that only one of several processes makes it.
    missing = [path, *(folder for folder in path.parents if not folder.exists())]
    for folder in reversed(missing):
        try:
            make_folder(folder)
        except FileExistsError:
            if folder == path or not folder.is_dir():
                raise
        sync_folder(folder.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content; removes a symbolic link without following it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_file(path: Path, data: Buffer) -> None:
    """Write a small new file and flush it."""
    with naming(path):
        descriptor = create(path)
        try:
            write(descriptor, data)
            sync(descriptor)
        finally:
            close(descriptor)


def open_regular(path: Path) -> tuple[int, int]:
    """Open a file of a checkpoint for reading.

    Returns:
        The descriptor and the file's size in bytes.

    Raises:
        CheckpointError: the file is missing, unreadable, a symbolic link, or no regular file.
    """
    try:
        # O_NONBLOCK: opening a pipe at this path must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a symbolic link; a checkpoint holds plain files only") from None
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a plain file")
    return descriptor, status.st_size


def read_into(descriptor: int, offset: int, target: memoryview, path: Path) -> None:
    """Fill ``target`` with the file's bytes from ``offset`` on; CheckpointError if it is too short, or the disk
    fails."""
    done = 0
    while done < target.nbytes:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read at byte {offset + done} ({error.strerror})") from error
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset + done}, {target.nbytes - done} bytes short")
        done += count


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a small file of a checkpoint, of at most ``limit`` bytes."""
    descriptor, size = open_regular(path)
    try:
        if size > limit:
            raise CheckpointError(f"{path}: has {size} bytes, more than the {limit} that can be right")
        data = bytearray(size)
        read_into(descriptor, 0, memoryview(data), path)
        return bytes(data)
    finally:
        os.close(descriptor)
