"""Ends of processes: workers die with their launcher, even after SIGKILL, and exit without teardown.

Two mechanisms work together. The kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG) works while the interpreter
is stuck in C code. A pipe whose write end only the launcher holds closes with the launcher; it works across a replaced
parent and lets the worker kill its children. The same pipe carries the launcher's signal that the data is ready, while
workers import.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from mgpu_pipe.system.child_process import die_with_parent
from mgpu_pipe.system.compat.python_private import run_exit_hooks
from mgpu_pipe.system.joined_world import LIFELINE_FD

GO = b"g"
LAUNCHER_PID = "MGPU_LAUNCHER_PID"

_close_in_forks: set[int] = set()
_forks_bound = _hooks_stand = False
_forked_by: tuple[int, bool] = (0, False)


def bind_forks(bound: bool = True) -> None:
    """Set whether forks of the main thread (loader and tokeniser pools) die with this process; a thread may end
    early."""
    global _forks_bound, _hooks_stand
    _forks_bound = bound
    if bound and not _hooks_stand:
        _hooks_stand = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def keep_from_forks(fd: int) -> None:
    """Close ``fd`` in later forks: a copy of a lifeline's write end would keep it open."""
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
            continue  # already closed by its owner
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
        """Bind this process to the launcher in ``environment``; None without one (torchrun)."""
        if LIFELINE_FD not in environment:
            return None
        die_with_parent(int(environment[LAUNCHER_PID]))
        bind_forks()
        return cls(int(environment[LIFELINE_FD]))

    def wait_for_go(self) -> None:
        """Wait for the launcher's signal that data and folder are ready."""
        self._go.wait()

    def _watch(self) -> None:
        while True:
            word = os.read(self._fd, 1)
            if word == GO:
                self._go.set()
            elif not word:
                kill_own_group()


def kill_own_group() -> None:
    """Kill this process and, if it leads its process group as workers do, the group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def exit_now(code: int) -> NoReturn:
    """Exit with ``code``: join threads, run exit hooks and flush streams, without the interpreter's teardown.

    The teardown destroys process groups while their threads may still run. That sometimes aborts a finished process
    ("terminate called without an active exception"), and a finished run looks crashed. Without torch the teardown only
    costs time, a fifth of ``check``.
    """
    run_exit_hooks()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(code)
