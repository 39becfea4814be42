"""An engine's processes: started, watched, and ended with this program, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn

from mgpu_pipe.errors import MgpuError, print_line
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.serving.client import EngineClient
from mgpu_pipe.system.child_process import bound

TAIL_LINES = 20
SHOWN_LINES = 3
POLL_S = 0.2
TERM_S = 10.0
"""Time that an engine gets after SIGTERM."""


class EngineProcess:
    """A running engine, in a process group of its own.

    The kernel kills the engine with this process's main thread; the orphan guard then kills the rest of its group.

    Args:
        name: of the engine, for messages.
        environment: added to this process's.
        passed: descriptors that the engine inherits.
        is_verbose: whether the engine's output goes to standard error.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], passed: Sequence[int], is_verbose: bool
    ) -> None:
        self._name, self._tail = name, deque[str](maxlen=TAIL_LINES)
        self._guard = OrphanGuard()
        self._process = subprocess.Popen(
            bound(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=passed,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        self._reader = threading.Thread(target=self._read, args=(is_verbose,), daemon=True)
        self._reader.start()

    def _read(self, is_verbose: bool) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._tail.append(line)
            if is_verbose:
                print_line(line, file=sys.stderr, flush=True)

    def wait_until_ready(self, client: EngineClient) -> None:
        """Wait until ``client`` is answered.

        Raises:
            MgpuError: the engine ended.
        """
        while not client.is_ready():
            if self.has_ended():
                raise self.end_error()
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Whether the engine ended. It is not reaped, so that its group's ID is not reused before :meth:`end`."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def end_error(self) -> MgpuError:
        """The error of an engine that ended, with the last that it printed."""
        self._reader.join(1)
        tail = " | ".join(list(self._tail)[-SHOWN_LINES:]) or "it printed nothing"
        return MgpuError(f"--engine={self._name}: ended: {tail}; --verbose shows all that it prints")

    def end(self) -> None:
        """End the engine and everything that it started; again, or after Ctrl-C, at once."""
        try:
            os.kill(self._process.pid, signal.SIGTERM)
            deadline = time.monotonic() + TERM_S
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(POLL_S / 4)
        except KeyboardInterrupt:
            print_line("ending at once", file=sys.stderr)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.dismiss(self._process.pid)
        self._guard.close()


def wait_for_any(processes: Sequence[EngineProcess]) -> NoReturn:
    """Wait until an engine ends, which is an error.

    Raises:
        MgpuError: always.
    """
    while True:
        for process in processes:
            if process.has_ended():
                raise process.end_error()
        time.sleep(POLL_S)
