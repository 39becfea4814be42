"""Fork server: a process with training's imports, from which the workers of a sweep's runs are forked.

The imports end before the first run starts and disturb no measured run. The server only imports: it computes nothing,
uses no device and knows no run. A worker starts like a new program: the launcher is its parent, and it has its own
session, descriptors and variables. Libraries read the environment at import, so another environment, apart from a
worker's variables, gets another server.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from mgpu_pipe.import_path import python_module
from mgpu_pipe.launch import workers
from mgpu_pipe.launch.world import ATTEMPT, STORE_FD
from mgpu_pipe.system.child_process import adopt, die_with_parent
from mgpu_pipe.system.process_end import LAUNCHER_PID, LIFELINE_FD, bind_forks, exit_now

NAME, COMM = "fork-server", Path("/proc/self/comm")
"""Process name in ps(1) and top(1)."""
MODULE = "mgpu_pipe.launch.fork_server"
WORKER_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("MGPU_TTY", "COLUMNS", "LINES", LAUNCHER_PID, LIFELINE_FD),
        *(ATTEMPT, STORE_FD, workers.ERROR_FD, workers.INHERITED_FDS, workers.LIVE_FD, workers.RESUME),
    )
)
"""Variables that differ between workers. ``compat`` updates libraries that read one at import."""
READY = b"ready"
REQUEST_BYTES, REQUEST_FDS = 65536, 64
REPARENTED_S = 0.0005

_servers: list[ForkServer | None] = []


@contextmanager
def keep_server() -> Iterator[None]:
    """Forks the workers of this process's runs from a server that stays between runs."""
    _servers.append(None)
    try:
        yield
    finally:
        server = _servers.pop()
        if server is not None:
            server.close()


def serving(environment: Mapping[str, str]) -> ForkServer | None:
    """Server for workers of this environment, started if needed; None outside of :func:`keep_server`."""
    if not _servers:
        return None
    server = _servers[-1]
    if server is None or not server.fits(environment):
        if server is not None:
            server.close()
        server = _servers[-1] = ForkServer(environment)
    return server


class Forked:
    """A worker forked from a server; a child of this process, like a :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Wait for the worker; returns its exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """Launcher's side of the server. Must be started by the main thread, with which the server ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _shared_variables(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "ab", buffering=0) as nowhere:
            self._process = subprocess.Popen(
                python_module(MODULE, str(os.getpid()), str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=nowhere,
                stderr=nowhere,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ready = self._gone = False

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the server is alive and its imports fit a worker of this environment."""
        return not self._gone and self._environment == _shared_variables(environment)

    def wait(self) -> bool:
        """Wait for the imports; False if they failed, which a worker started afresh will explain."""
        if not (self._ready or self._gone):
            self._ready = self._control.recv(len(READY)) == READY
            self._gone = not self._ready
        return self._ready

    def start(
        self, argv: Sequence[str], log: int, environment: Mapping[str, str], passed: Sequence[int]
    ) -> Forked | None:
        """Start a worker in its own session; None if the server is gone or cannot fork.

        Args:
            argv: the worker's command: Python, its module and its arguments.
            log: descriptor for standard output and error.
            passed: descriptors that the worker keeps under the same numbers.
        """
        if not self.wait():
            return None
        answer, theirs = os.pipe()
        variables = {name: value for name, value in environment.items() if name in WORKER_VARIABLES}
        arguments = list(argv[list(argv).index(workers.WORKER) + 1 :])
        words = {"arguments": arguments, "environment": variables, "passed": list(passed), "cwd": os.getcwd()}
        adopt(descendants=True)
        try:
            try:
                socket.send_fds(self._control, [json.dumps(words).encode()], [theirs, log, *passed])
            finally:
                os.close(theirs)
            with os.fdopen(answer, "rb") as pipe:
                pid = pipe.read()
        except OSError:
            pid = b""
        finally:
            adopt(descendants=False)
        self._gone = not pid
        return Forked(int(pid)) if pid else None

    def close(self) -> None:
        """End the server; its workers continue."""
        self._control.close()
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in WORKER_VARIABLES}


def serve(launcher: int, control_fd: int) -> NoReturn:
    """Server's side: import, then fork a worker for every request until the launcher closes the socket."""
    die_with_parent(launcher)
    bind_forks(False)  # the intermediate process ends at once
    COMM.write_text(NAME)
    from mgpu_pipe.launch.worker import import_all

    import_all()
    control = socket.socket(fileno=control_fd)
    control.send(READY)
    while True:
        words, received, _, _ = socket.recv_fds(control, REQUEST_BYTES, REQUEST_FDS)
        if not words:
            os._exit(0)
        intermediate = os.fork()
        if intermediate == 0:
            # a grandchild whose parent ends is adopted by the launcher
            parent = os.getpid()
            if os.fork() == 0:
                while os.getppid() == parent:
                    time.sleep(REPARENTED_S)
                control.detach()
                _become(json.loads(words), received, launcher)
            os._exit(0)
        os.waitpid(intermediate, 0)
        for fd in received:
            os.close(fd)


def _become(words: Mapping[str, Any], received: Sequence[int], launcher: int) -> NoReturn:
    """Turn this process into the requested worker, in the state of a new program."""
    os.setsid()
    die_with_parent(launcher)
    COMM.write_text("python")
    os.chdir(words["cwd"])
    above = max(*received, *words["passed"]) + 1
    answer, log, *passed = (fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received)
    os.closerange(3, above)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    for fd, number in zip(passed, words["passed"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for name in WORKER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(words["environment"])
    import numpy

    from mgpu_pipe.launch import worker
    from mgpu_pipe.system.compat.lightning_private import imported_as
    from mgpu_pipe.system.compat.torch_private import can_use_devices

    if not can_use_devices():
        os._exit(1)  # no answer: the launcher starts the worker afresh
    imported_as(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    numpy.random.seed()  # Python reseeds itself after a fork; torch's seed is fixed
    sys.argv = [worker.__file__, *words["arguments"]]
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    exit_now(worker.main(Path(sys.argv[1])))


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
