"""One attempt's group of workers: started, released, signalled, reaped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mgpu_pipe.config.joined_world import LIFELINE_FD
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.launch import parent_death
from mgpu_pipe.launch.orphan_guard import OrphanGuard
from mgpu_pipe.launch.stop import WHERE

if TYPE_CHECKING:
    from mgpu_pipe.launch.fork_server import Forked, ForkServer

WORKER = ("-m", "mgpu_pipe.launch.worker")
HOST = "127.0.0.1"
STORE_FD = "MGPU_STORE_FD"
ATTEMPT = "MGPU_ATTEMPT"
LIVE_FD = "MGPU_LIVE_FD"
ERROR_FD = "MGPU_ERROR_FD"
PIPE_BYTES = 65536
STOPPED = ("T", "t")
STACKS_S = 0.3
"""In which a worker writes its stacks."""
RESUME = "MGPU_RESUME"
"""The step folder an attempt resumes from; empty starts afresh."""
INHERITED_FDS = "MGPU_INHERITED_FDS"


LOOPBACK = Path("/sys/class/net/lo")


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        code: its exit code, or minus the signal that ended it.
        seen_at: seconds since the epoch.
        error: the record it sent instead of leaving a file; mostly empty.
    """

    rank: int
    code: int
    seen_at: float
    error: str = ""


@dataclass(frozen=True)
class WorkerPlan:
    """What every attempt of a run starts.

    Attributes:
        argv: the worker's command; a list, never a shell string.
        world_size: workers, on all nodes.
        paths: the run's folder.
        environment: variables over the launcher's own.
        live_fd: where rank 0's standard error is shown as well; None shows it nowhere.
        inherited_fds: descriptors every worker keeps open (the run's lock).
        first_rank, here: of the workers that this node starts, the first one's rank and their number; None: all.
        address: of this node, where the workers meet; another node's rank 0 listens at ``port`` of it.
        port: of rank 0, where another node starts it.
        server: forks the workers; None: each is a new program.
    """

    argv: Sequence[str]
    world_size: int
    paths: RunPaths
    environment: Mapping[str, str] = field(default_factory=dict)
    live_fd: int | None = None
    inherited_fds: tuple[int, ...] = ()
    first_rank: int = 0
    here: int | None = None
    address: str = HOST
    port: int | None = None
    server: ForkServer | None = None

    @property
    def ranks(self) -> range:
        """Those that this node starts."""
        return range(self.first_rank, self.first_rank + (self.here or self.world_size))

    def with_environment(self, more: Mapping[str, str]) -> WorkerPlan:
        return replace(self, environment={**self.environment, **more})


class WorkerGroup:
    """The workers of one attempt. Must be started by the launcher's main thread, whose end they follow."""

    def __init__(self, plan: WorkerPlan, attempt: int) -> None:
        self.attempt = attempt
        self.exits: list[Exit] = []
        self._running: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._lifelines: dict[int, int] = {}
        self._errors: dict[int, int] = {}
        self._orphan_guard = OrphanGuard()
        parent_death.keep_from_forks(self._orphan_guard.fd)
        plan.paths.logs.mkdir(exist_ok=True)
        for rank in plan.ranks:
            plan.paths.rank_error(rank).unlink(missing_ok=True)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as store:
            if plan.port is None:
                # listening from here on: no other process can take the port
                store.bind((HOST if plan.address == HOST else "", 0))
                store.listen(max(128, plan.world_size))
            self.port = plan.port or store.getsockname()[1]
            """Where rank 0 listens."""
            try:
                for rank in plan.ranks:
                    self._start(plan, rank, store)
            except BaseException:
                self.kill()
                raise

    def _start(self, plan: WorkerPlan, rank: int, store: socket.socket) -> None:
        read_fd, write_fd = os.pipe()
        parent_death.keep_from_forks(write_fd)
        self._lifelines[rank] = write_fd
        self._errors[rank], error_fd = os.pipe()
        os.set_blocking(self._errors[rank], False)
        passed = [read_fd, error_fd, *plan.inherited_fds]
        environment = {
            **os.environ,
            **plan.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - plan.first_rank),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_WORLD_SIZE": str(len(plan.ranks)),
            "GROUP_RANK": str(rank // len(plan.ranks)),
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(self.port),
            ATTEMPT: str(self.attempt),
            parent_death.LAUNCHER_PID: str(os.getpid()),
            LIFELINE_FD: str(read_fd),
            ERROR_FD: str(error_fd),
            INHERITED_FDS: ",".join(map(str, (*plan.inherited_fds, error_fd))),
        }
        if rank == 0:
            passed.append(store.fileno())
            environment[STORE_FD] = str(store.fileno())
            if plan.live_fd is not None:
                passed.append(plan.live_fd)
                environment[LIVE_FD] = str(plan.live_fd)
                environment.update(_terminal(plan.live_fd))
        try:
            with open_log(plan.paths.rank_log(rank), rank, plan.world_size, self.attempt) as log:
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
        """Ranks that have not ended."""
        return sorted(self._running)

    @property
    def standing_still(self) -> frozenset[int]:
        """Running ranks that are stopped: by SIGSTOP, or by a debugger."""
        return frozenset(rank for rank, process in self._running.items() if is_stopped(process.pid))

    def release(self) -> None:
        """Tell the workers that data and folder are ready."""
        for rank, fd in self._lifelines.items():
            if rank in self._running:
                try:
                    os.write(fd, parent_death.GO)
                except BrokenPipeError:
                    continue  # it died already; reap() finds it

    def reap(self) -> list[Exit]:
        """Collect the workers that ended since the last call, and end what they left behind."""
        exits = []
        for rank, process in list(self._running.items()):
            # still unreaped, so its process group cannot be another's
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            exits.append(self._end(rank))
        self.exits += exits
        return exits

    def terminate(self) -> None:
        """Ask the workers themselves, not their children, to save and leave."""
        for process in self._running.values():
            os.kill(process.pid, signal.SIGTERM)

    def tell_where(self) -> None:
        """Have the running workers write to their logs what they are doing, and give them the time."""
        for process in self._running.values():
            os.kill(process.pid, WHERE)
        time.sleep(STACKS_S)

    def kill(self) -> None:
        """End every worker and all it started, at once, wait until they are gone, and release everything."""
        for process in self._running.values():
            _kill_group(process.pid)
        self.exits += [self._end(rank) for rank in self.running]
        for rank in list(self._lifelines):  # of a worker that could not be started
            self._close_pipes(rank)
        parent_death.forget(self._orphan_guard.fd)
        self._orphan_guard.close()

    def _end(self, rank: int) -> Exit:
        """Reap a worker that has ended, or kill it first; end what it left behind too."""
        process = self._running.pop(rank)
        _kill_group(process.pid)
        self._orphan_guard.dismiss(process.pid)
        code = process.wait()
        return Exit(rank, code, time.time(), self._close_pipes(rank))

    def _close_pipes(self, rank: int) -> str:
        """Returns the error record in the worker's pipe, if there is one."""
        fd = self._lifelines.pop(rank)
        parent_death.forget(fd)
        os.close(fd)
        with os.fdopen(self._errors.pop(rank), "rb", buffering=0) as pipe:
            return (pipe.read(PIPE_BYTES) or b"").decode()


def open_log(path: Path, rank: int, world_size: int, attempt: int) -> IO[bytes]:
    """The rank's log, with a header line that separates this attempt from those before it."""
    log = path.open("ab", buffering=0)
    moment = time.strftime("%Y-%m-%d %H:%M:%S %z")
    log.write(f"{log_header(attempt)} rank {rank} of {world_size}, {moment}\n".encode())
    return log


def log_header(attempt: int) -> str:
    return f"--- attempt {attempt}:"


def is_stopped(pid: int) -> bool:
    """Whether the kernel keeps a process from running: after SIGSTOP, or for a debugger. See proc(5)."""
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
    """Tells rank 0 that what it shows reaches a terminal, and how large that is."""
    if not os.isatty(fd):
        return {}
    size = os.get_terminal_size(fd)
    return {"MGPU_TTY": "1", "COLUMNS": str(size.columns or 80), "LINES": str(size.lines or 24)}


def worker_environment(threads: int, *, one_host: bool = True) -> dict[str, str]:
    """What all workers of this machine get beside their ranks."""
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if one_host and "GLOO_SOCKET_IFNAME" not in os.environ and LOOPBACK.exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks for the host's name, which may lead nowhere
    return environment
