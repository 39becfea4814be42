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


def die_with_parent(parent_pid: int) -> None:
    """Get SIGKILL when the thread of ``parent_pid`` that started this process ends; at once if it is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os._exit(1)


def bound(command: Sequence[str]) -> list[str]:
    """``command``, run as a child of this process's main thread that does not outlive it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
