"""Group of the workers of an attempt: starts, releases, signals and reaps them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.launch.signals import WHERE
from mgpu_pipe.launch.world import ATTEMPT, STORE_FD, World
from mgpu_pipe.system import process_end as parent_death
from mgpu_pipe.system.joined_world import LIFELINE_FD

if TYPE_CHECKING:
    from mgpu_pipe.launch.fork_server import Forked, ForkServer

WORKER = "mgpu_pipe.launch.worker"
"""Module of a worker."""
LIVE_FD = "MGPU_LIVE_FD"
ERROR_FD = "MGPU_ERROR_FD"
PIPE_BYTES = 65536
STOPPED = ("T", "t")
STACKS_S = 0.3
"""Seconds for a worker to write its stacks."""
RESUME = "MGPU_RESUME"
"""Variable with the step folder to resume from; empty starts afresh."""
INHERITED_FDS = "MGPU_INHERITED_FDS"


Store = IO[bytes] | socket.socket


@dataclass(frozen=True)
class Exit:
    """The end of a worker.

    Attributes:
        code: exit code, or minus the signal that ended it.
        seen_at: seconds since the epoch.
        error: error record sent through the pipe instead of a file; usually empty.
    """

    rank: int
    code: int
    seen_at: float
    error: str = ""


@dataclass(frozen=True)
class WorkerPlan:
    """Plan of the workers that every attempt of a run starts.

    Attributes:
        argv: the worker's command as a list.
        world: world of the workers, at the place of this node's first worker.
        paths: the run's folder.
        environment: variables on top of the launcher's.
        live_fd: second descriptor for rank 0's standard error; None for none.
        inherited_fds: descriptors that every worker keeps open (the run's lock).
        server: server that forks the workers; None starts new programs.
    """

    argv: Sequence[str]
    world: World
    paths: RunPaths
    environment: Mapping[str, str] = field(default_factory=dict)
    live_fd: int | None = None
    inherited_fds: tuple[int, ...] = ()
    server: ForkServer | None = None

    def with_environment(self, more: Mapping[str, str]) -> WorkerPlan:
        return replace(self, environment={**self.environment, **more})


class WorkerGroup:
    """The workers of an attempt. Must be started by the launcher's main thread, with which they end."""

    def __init__(self, plan: WorkerPlan, attempt: int) -> None:
        self.attempt = attempt
        self.exits: list[Exit] = []
        self._running: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._lifelines: dict[int, int] = {}
        self._errors: dict[int, int] = {}
        self._orphan_guard = OrphanGuard()
        parent_death.keep_from_forks(self._orphan_guard.fd)
        plan.paths.logs.mkdir(exist_ok=True)
        for rank in plan.world.node_ranks:
            plan.paths.rank_error(rank).unlink(missing_ok=True)
        with ExitStack() as resources:
            store = None if plan.world.master_port else self._store(plan.world, resources)
            self.port = plan.world.master_port or (store.getsockname()[1] if isinstance(store, socket.socket) else 0)
            """Port of rank 0; 0 with a file store."""
            try:
                for rank in plan.world.node_ranks:
                    self._start(plan, rank, store if rank == 0 or not self.port else None)
            except BaseException:
                self.kill()
                raise

    def _store(self, world: World, resources: ExitStack) -> Store:
        """Store of the workers: an unnamed file on one machine, which no other process can open; else a socket."""
        if world.nodes == 1:
            return resources.enter_context(os.fdopen(os.memfd_create("store"), "r+b"))
        store = resources.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        store.bind(("", 0))
        store.listen(max(128, world.world_size))  # from here on no other process can take the port
        return store

    def _start(self, plan: WorkerPlan, rank: int, store: Store | None) -> None:
        """Start a worker: forked from the server, or as a new process.

        It inherits a pipe that closes with this launcher, a pipe for its error, and ``store`` if it serves it.
        """
        read_fd, write_fd = os.pipe()
        parent_death.keep_from_forks(write_fd)
        self._lifelines[rank] = write_fd
        self._errors[rank], error_fd = os.pipe()
        os.set_blocking(self._errors[rank], False)
        passed = [read_fd, error_fd, *plan.inherited_fds]
        environment = {
            **os.environ,
            **plan.environment,
            **plan.world.worker_variables(rank, self.port),
            ATTEMPT: str(self.attempt),
            parent_death.LAUNCHER_PID: str(os.getpid()),
            LIFELINE_FD: str(read_fd),
            ERROR_FD: str(error_fd),
            INHERITED_FDS: ",".join(map(str, (*plan.inherited_fds, error_fd))),
        }
        if store:
            passed.append(store.fileno())
            environment[STORE_FD] = str(store.fileno())
        if rank == 0 and plan.live_fd is not None:
            passed.append(plan.live_fd)
            environment[LIVE_FD] = str(plan.live_fd)
            environment.update(_terminal(plan.live_fd))
        try:
            with open_log(plan.paths.rank_log(rank), rank, plan.world.world_size, self.attempt) as log:
                forked = plan.server and plan.server.start(plan.argv, log.fileno(), environment, passed)
                self._running[rank] = forked or subprocess.Popen(
                    list(plan.argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=passed,
                    start_new_session=True,
                )
            self._orphan_guard.watch(self._running[rank].pid)
        finally:
            os.close(read_fd)
            os.close(error_fd)

    @property
    def running(self) -> list[int]:
        """Ranks that are still running."""
        return sorted(self._running)

    @property
    def standing_still(self) -> frozenset[int]:
        """Ranks stopped by SIGSTOP or a debugger."""
        return frozenset(rank for rank, process in self._running.items() if is_stopped(process.pid))

    def release(self) -> None:
        """Signal the workers that data and folder are ready."""
        for rank, fd in self._lifelines.items():
            if rank in self._running:
                try:
                    os.write(fd, parent_death.GO)
                except BrokenPipeError:
                    continue  # it is dead already; reap() finds it

    def reap(self) -> list[Exit]:
        """Collect the workers that ended since the last call, and kill their leftover children."""
        exits = []
        for rank, process in list(self._running.items()):
            # while unreaped, its group ID is not reused
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            exits.append(self._end(rank))
        self.exits += exits
        return exits

    def terminate(self) -> None:
        """Send SIGTERM to the workers, not to their children, so that they save and exit."""
        for process in self._running.values():
            os.kill(process.pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Let the running workers write their stacks to their logs, and wait for it."""
        for process in self._running.values():
            os.kill(process.pid, WHERE)
        time.sleep(STACKS_S)

    def kill(self) -> None:
        """Kill every worker and its children, wait until they are gone, and release all resources."""
        for process in self._running.values():
            _kill_group(process.pid)
        self.exits += [self._end(rank) for rank in self.running]
        for rank in list(self._lifelines):  # for a worker that failed to start
            self._close_pipes(rank)
        parent_death.forget(self._orphan_guard.fd)
        self._orphan_guard.close()

    def _end(self, rank: int) -> Exit:
        """Kill a worker and its children, and reap it."""
        process = self._running.pop(rank)
        _kill_group(process.pid)
        self._orphan_guard.dismiss(process.pid)
        code = process.wait()
        return Exit(rank, code, time.time(), self._close_pipes(rank))

    def _close_pipes(self, rank: int) -> str:
        """Close the pipes of a worker; returns the error record in its pipe, or an empty text."""
        fd = self._lifelines.pop(rank)
        parent_death.forget(fd)
        os.close(fd)
        with os.fdopen(self._errors.pop(rank), "rb", buffering=0) as pipe:
            return (pipe.read(PIPE_BYTES) or b"").decode()


def open_log(path: Path, rank: int, world_size: int, attempt: int) -> IO[bytes]:
    """Open a rank's log and write a header line for this attempt."""
    log = path.open("ab", buffering=0)
    moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
    log.write(f"{log_header(attempt)} rank {rank} of {world_size}, {moment}\n".encode())
    return log


def log_header(attempt: int) -> str:
    return f"--- attempt {attempt}:"


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger has stopped a process; see proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] in STOPPED


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _terminal(fd: int) -> dict[str, str]:
    """Variables that tell rank 0 the size of its terminal; none without one."""
    if not os.isatty(fd):
        return {}
    size = os.get_terminal_size(fd)
    return {"MGPU_TTY": "1", "COLUMNS": str(size.columns or 80), "LINES": str(size.lines or 24)}
