"""Binds child processes to their parent: the kernel kills a child when its parent ends.

Also a program that binds itself to its parent and executes another: ``python child_process.py PARENT COMMAND ...``. It
imports nothing of this package, so that the bond exists almost at once; it then checks that the parent is still alive.
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
    """Get SIGKILL when the thread of ``parent_pid`` that started this process ends, or now if it is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt(descendants: bool) -> None:
    """Set whether descendants of this process become its children when their parents end."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(descendants))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def bind_command(command: Sequence[str]) -> list[str]:
    """``command``, bound to end with this process's main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
