"""Nothing survives its parent: a process dies with the one that started it, also when that gets SIGKILL.

Two ways at once. The kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG) works while the interpreter is stuck
in C code. A pipe whose write end only the launcher holds reaches its end when the launcher is gone, works across a
parent that was replaced, and lets the worker take its own children along. The same pipe carries the launcher's
word that the data is ready, so that workers can import what they need meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

from mgpu_pipe.child import die_with_parent
from mgpu_pipe.config.joined_world import LIFELINE_FD

GO = b"g"
LAUNCHER_PID = "MGPU_LAUNCHER_PID"

_close_in_forks: set[int] = set()
_forks_bound = _hooks_stand = False
_forked_by: tuple[int, bool] = (0, False)


def bind_forks(bound: bool = True) -> None:
    """Let processes forked by this one's main thread (loader and tokeniser pools) die with it, or live on.

    The kernel's signal is bound to the forking thread, so forks of other threads, which may end early, are left out.
    """
    global _forks_bound, _hooks_stand
    _forks_bound = bound
    if bound and not _hooks_stand:
        _hooks_stand = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def keep_from_forks(fd: int) -> None:
    """Close ``fd`` in processes forked from now on: a copy of a lifeline's write end would keep it open."""
    bind_forks()
    _close_in_forks.add(fd)


def forget(fd: int) -> None:
    _close_in_forks.discard(fd)


def _before_fork() -> None:
    global _forked_by
    _forked_by = (os.getpid(), threading.current_thread() is threading.main_thread())


def _after_fork() -> None:
    parent_pid, by_main_thread = _forked_by
    for fd in _close_in_forks:
        try:
            os.close(fd)
        except OSError:
            continue  # closed by its owner before
    _close_in_forks.clear()
    if by_main_thread and _forks_bound:
        die_with_parent(parent_pid)


class Lifeline:
    """A worker's end of the pipe from its launcher."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._go = threading.Event()
        os.set_inheritable(fd, False)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def attach(cls, environment: Mapping[str, str]) -> Lifeline | None:
        """Bind this process to the launcher named in ``environment``; None where there is none (torchrun)."""
        if LIFELINE_FD not in environment:
            return None
        die_with_parent(int(environment[LAUNCHER_PID]))
        bind_forks()
        return cls(int(environment[LIFELINE_FD]))

    def wait_for_go(self) -> None:
        """Return once the launcher says that data and folder are ready."""
        self._go.wait()

    def _watch(self) -> None:
        while True:
            word = os.read(self._fd, 1)
            if word == GO:
                self._go.set()
            elif not word:
                kill_own_group()


def kill_own_group() -> None:
    """End this process and all it started. A worker leads its own process group; others end themselves only."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
