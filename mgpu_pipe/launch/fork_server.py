"""A process that has imported what training needs, from which the workers of a sweep's runs are forked.

So the imports are over before the first run begins, and disturb none that is measured. The server only imports: it
computes nothing, uses no device and knows no run. A worker has what a new program has: the launcher as its parent, a
session, the descriptors and the variables that it is given. Libraries read the environment while they are imported;
where it is another one, a run's own variables aside, there is another server.
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

from mgpu_pipe.child import adopt, die_with_parent
from mgpu_pipe.launch import workers
from mgpu_pipe.launch.parent_death import LAUNCHER_PID, LIFELINE_FD, bind_forks
from mgpu_pipe.launch.process_exit import exit_now

NAME, COMM = "fork-server", Path("/proc/self/comm")
"""What ps(1) and top(1) show."""
MODULE = "mgpu_pipe.launch.fork_server"
OWN = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("MGPU_TTY", "COLUMNS", "LINES", LAUNCHER_PID, LIFELINE_FD),
        *(workers.ATTEMPT, workers.ERROR_FD, workers.INHERITED_FDS, workers.LIVE_FD, workers.RESUME, workers.STORE_FD),
    )
)
"""Variables that differ from worker to worker. ``compat`` sets them again in libraries that read one at import."""
READY = b"ready"
REQUEST_BYTES, REQUEST_FDS = 65536, 64
REPARENTED_S = 0.0005

_kept: list[ForkServer | None] = []


@contextmanager
def kept() -> Iterator[None]:
    """Within this, the workers of this process's runs are forked from a server, which is kept from run to run."""
    _kept.append(None)
    try:
        yield
    finally:
        server = _kept.pop()
        if server is not None:
            server.close()


def serving(environment: Mapping[str, str]) -> ForkServer | None:
    """The server for workers of this environment, started where none runs; None outside of :func:`kept`."""
    if not _kept:
        return None
    server = _kept[-1]
    if server is None or not server.fits(environment):
        if server is not None:
            server.close()
        server = _kept[-1] = ForkServer(environment)
    return server


class Forked:
    """A worker that was forked from a server; this process's child, as one of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """The launcher's side. Must be started by its main thread, whose end the server follows."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _shared(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "ab", buffering=0) as nowhere:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=nowhere,
                stderr=nowhere,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ready = self._gone = False

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether it is there still, and a worker of this environment would have imported the same under it."""
        return not self._gone and self._environment == _shared(environment)

    def wait(self) -> bool:
        """Until everything is imported; False where that failed: a worker that is started afresh will tell why."""
        if not (self._ready or self._gone):
            self._ready = self._control.recv(len(READY)) == READY
            self._gone = not self._ready
        return self._ready

    def start(
        self, argv: Sequence[str], log: int, environment: Mapping[str, str], passed: Sequence[int]
    ) -> Forked | None:
        """A worker, in its own session; None where the server is gone, or cannot be forked.

        Args:
            argv: the worker's command, which is Python's, ``-m``, its module and its arguments.
            log: the descriptor that standard output and error go to.
            passed: descriptors that it keeps, under these very numbers.
        """
        if not self.wait():
            return None
        answer, theirs = os.pipe()
        own = {name: value for name, value in environment.items() if name in OWN}
        arguments = list(argv[len(workers.WORKER) + 1 :])
        words = {"arguments": arguments, "environment": own, "passed": list(passed), "cwd": os.getcwd()}
        adopt(descendants=True)
        try:
            try:
                socket.send_fds(self._control, [json.dumps(words).encode()], [theirs, log, *passed])
            finally:
                os.close(theirs)
            with os.fdopen(answer, "rb") as told:
                pid = told.read()
        except OSError:
            pid = b""
        finally:
            adopt(descendants=False)
        self._gone = not pid
        return Forked(int(pid)) if pid else None

    def close(self) -> None:
        """End the server. Its workers stay."""
        self._control.close()
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN}


def serve(launcher: int, control_fd: int) -> NoReturn:
    """The server's side: import, then fork a worker for every request, until the launcher closes its end."""
    die_with_parent(launcher)
    bind_forks(False)  # the process between server and worker ends at once
    COMM.write_text(NAME)
    from mgpu_pipe.launch.worker import import_all

    import_all()
    control = socket.socket(fileno=control_fd)
    control.send(READY)
    while True:
        words, received, _, _ = socket.recv_fds(control, REQUEST_BYTES, REQUEST_FDS)
        if not words:
            os._exit(0)
        between = os.fork()
        if between == 0:
            # the child of a process that ends at once gets the launcher as its parent
            here = os.getpid()
            if os.fork() == 0:
                while os.getppid() == here:
                    time.sleep(REPARENTED_S)
                control.detach()
                _become(json.loads(words), received, launcher)
            os._exit(0)
        os.waitpid(between, 0)
        for fd in received:
            os.close(fd)


def _become(words: Mapping[str, Any], received: Sequence[int], launcher: int) -> NoReturn:
    """Turn this process into the worker that was asked for, as a new program would begin."""
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
    for name in OWN:
        os.environ.pop(name, None)
    os.environ.update(words["environment"])
    import numpy

    from mgpu_pipe.compat.lightning_private import imported_as
    from mgpu_pipe.compat.torch_private import can_use_devices
    from mgpu_pipe.launch import worker

    if not can_use_devices():
        os._exit(1)  # without an answer; it is started afresh then
    imported_as(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    numpy.random.seed()  # Python's own draws anew in a fork by itself, torch's is fixed
    sys.argv = [worker.__file__, *words["arguments"]]
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    exit_now(worker.main(Path(sys.argv[1])))


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
