"""A run's own folder on the NVMe disk: two runs never share files, and what a killed run left is removed."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
from pathlib import Path

PREFIX = "mgpu-zero-"
GUARD, IN_USE = ".mgpu-zero-{user}.lock", "in-use"
"""The guard is a user's own: several may share the disk, and none can touch what is another's."""


def claim(root: Path, token: str) -> Path:
    """The folder ``token`` under ``root``, held by this process until it ends; a clean end removes it.

    Every process of the run on this node makes this call. Folders that no living process holds are deleted.
    """
    folder = root / f"{PREFIX}{token}"
    with (root / GUARD.format(user=os.getuid())).open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        for other in root.glob(f"{PREFIX}*"):
            if other != folder and not _is_held(other):
                shutil.rmtree(other, ignore_errors=True)
    atexit.register(_release, folder, descriptor)
    return folder


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDWR)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's
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
