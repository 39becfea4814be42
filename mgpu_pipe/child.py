"""Nothing survives its parent: the kernel ends a process when the one that started it ends.

Also a program, which binds itself to its parent and becomes another: ``python child.py PARENT COMMAND ...``. It imports
nothing of this package, so that there is next to no moment without the bond, and none that is not looked back on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Get SIGKILL when the thread of ``parent_pid`` that started this process ends; at once if it is gone already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt(descendants: bool) -> None:
    """Say whether descendants of this process become its children when their own parents end."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(descendants))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def bound(command: Sequence[str]) -> list[str]:
    """``command``, run as a child of this process's main thread that does not outlive it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
