"""Fixes for errors of the machine: full disks, limits, permissions."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

FIXES = {
    errno.ENAMETOOLONG: "shorten the path",
    errno.ELOOP: "remove the link that leads to itself",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "give a file",
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close some programs",
    errno.EIO: "the disk failed; look at the system's log",
    errno.ESTALE: "mount the network file system again",
}
"""Fixes by errno. Any other OSError keeps its traceback."""


def fix_of_writing(why: str, otherwise: str) -> str:
    """Fix for a file that cannot be written.

    Args:
        why: the error, or a text that holds its ``strerror``.
        otherwise: for any error but the limit of the size of files, which no other folder and no free space mends.
    """
    return FIXES[errno.EFBIG] if os.strerror(errno.EFBIG) in why else otherwise


def creation_problem(folder: Path) -> str:
    """Reason why nothing can be made in a folder that is there; empty if something can.

    It makes a folder and removes it: permissions do not tell of ``/proc``, a quota or a full disk.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=folder))
    except OSError as error:
        return f"no folder can be made in {folder} ({error.strerror})"
    return ""
