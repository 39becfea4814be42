"""Fixes for errors of the machine: full disks, limits, permissions."""

from __future__ import annotations

import errno
import os

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
