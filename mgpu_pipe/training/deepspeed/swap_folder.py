"""A run's own folder on the NVMe disk: two runs never share files, and what a killed run left is removed."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mgpu_pipe.errors import BadInputError

PREFIX = "mgpu-zero-"
GUARD, IN_USE = ".mgpu-zero-{user}.lock", "in-use"
"""The guard is a user's own: several may share the disk, and none can touch what is another's."""


def claim(root: Path, token: str) -> Path:
    """The folder ``token`` under ``root`` for all the run's processes of the node; deletes those of dead processes."""
    folder = root / f"{PREFIX}{token}"
    with _open(root / GUARD.format(user=os.getuid())) as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        _make_private(folder)
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        for other in root.glob(f"{PREFIX}*"):
            if other != folder and not _is_held(other):
                shutil.rmtree(other, ignore_errors=True)
    atexit.register(_release, folder, descriptor)
    return folder


@contextmanager
def _open(guard: Path) -> Iterator[int]:
    """The user's guard, open; the disk may be shared, so its name may be another's link to a file of the user."""
    try:
        descriptor = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInputError(f"{guard}: cannot be opened ({error.strerror}); remove it, or use another disk") from error
    try:
        there = os.fstat(descriptor)
        if there.st_uid != os.getuid() or not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
            raise BadInputError(f"{guard}: is not a file of this user; remove it, or use another disk")
        yield descriptor
    finally:
        os.close(descriptor)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    if there.st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode):
        raise BadInputError(f"{folder}: is not a folder of this user; remove it, or use another disk")


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's, or made to look like a run's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _release(folder: Path, descriptor: int) -> None:
    """Release this process's lock; the last process on the node removes the folder."""
    os.close(descriptor)
    if folder.exists() and not _is_held(folder):
        shutil.rmtree(folder, ignore_errors=True)
