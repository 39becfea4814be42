"""Distributes work to a few processes and returns the results in order. It uses pipes only.

The standard library's pools and torch's loader create named semaphores, which stay in ``/dev/shm`` when all their
processes are killed. A pipe has no name and leaves nothing behind. Items are pickled between this process and its own
children only, as in multiprocessing; torch's pickler would put tensors in shared memory.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal, TypeVar

from mgpu_pipe.errors import WorkerError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.system.child_process import die_with_parent
from mgpu_pipe.system.hardware import cpu_cores

MODULE = "mgpu_pipe.data.ordered_work"
T = TypeVar("T")
R = TypeVar("R")


def work_in_order(
    items: Iterable[T],
    count: int,
    make: Callable[..., Callable[[T], R]],
    arguments: tuple[Any, ...],
    *,
    ahead: int,
    what: str,
) -> Iterator[R]:
    """Yields the result for each item of the function ``make(*arguments)``, built once in each of ``count`` processes.

    The processes are spawned, as a fork would copy locks of this process's threads. They end with the iteration and
    with this process, which must iterate in its main thread.

    Args:
        make: a module's function that returns a module's function.
        ahead: items a process gets before its first result is read.
        what: the error message where a process dies: its name and the fix.

    Raises:
        WorkerError: a process was killed.
    """
    pipes: list[Connection] = []
    processes: list[subprocess.Popen[bytes]] = []
    results: list[_Results] = []
    try:
        for _ in range(count):
            ours, theirs = Pipe()
            pipes.append(ours)
            with theirs:
                processes.append(_start_process(theirs))
            ours.send_bytes(json.dumps([entry for entry in sys.path if isinstance(entry, str)]).encode())
            _send(ours, (make, arguments), what)
        results += map(_Results, pipes)
        waiting: deque[_Results] = deque()
        for number, item in enumerate(items):
            _send(pipes[number % count], item, what)
            waiting.append(results[number % count])
            if len(waiting) >= ahead * count:
                yield _next(waiting.popleft(), what)
        while waiting:
            yield _next(waiting.popleft(), what)
    finally:
        _end_processes(processes, results, pipes)


def scan_in_order(
    items: Sequence[T],
    work: Callable[[T], R],
    workers: int | Literal["auto"],
    progress: Callable[[str, int, int], None],
    stage: str,
    *,
    pool_from: int,
    at_once: int = 64,
) -> list[R]:
    """Result of ``work`` for each item, by several processes where there are many items.

    Args:
        work: picklable.
        workers: number of processes; auto: one for each core.
        stage: of the progress: what a process does with the items.
        pool_from: number of items below which this process does all: starting processes takes longer.
        at_once: items that a process gets together.

    Raises:
        WorkerError: a process was killed.
    """
    parts = [items[start : start + at_once] for start in range(0, len(items), at_once)]
    workers = cpu_cores() if workers == "auto" else workers
    worked: Iterable[list[R]] = map(_part_worker(work), parts)
    if len(items) >= pool_from and workers > 1:
        died = "a process that scans files died (killed, or out of memory): use data.tokenize_workers=1"
        worked = work_in_order(parts, workers, _part_worker, (work,), ahead=4, what=died)
    results: list[R] = []
    for part in worked:
        results += part
        progress(stage, len(results), len(items))
    return results


def _part_worker(work: Callable[[T], R]) -> Callable[[Sequence[T]], list[R]]:
    return lambda part: [work(item) for item in part]


def _start_process(pipe: Connection) -> subprocess.Popen[bytes]:
    command = python_module(MODULE, str(os.getpid()), str(pipe.fileno()))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[pipe.fileno()])


def _end_processes(processes: list[subprocess.Popen[bytes]], results: list[_Results], pipes: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for worker in results:
        worker.join()  # its process has ended and closed the pipe
    for pipe in pipes:
        pipe.close()


def _send(pipe: Connection, item: object, what: str) -> None:
    try:
        pipe.send_bytes(pickle.dumps(item, protocol=5))
    except OSError as error:
        raise WorkerError(what) from error


class _Results(threading.Thread):
    """Reads a process's results at once: a pipe holds little, and the reader would wait for the rest."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.read: queue.SimpleQueue[tuple[bool, Any] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            while True:
                self.read.put(pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self.read.put(None)
        except Exception as error:
            self.read.put((False, error))


def _next(results: _Results, what: str) -> Any:
    result = results.read.get()
    if result is None:
        raise WorkerError(what)
    done, value = result
    if not done:
        raise value
    return value


def serve(parent_pid: int, pipe: Connection) -> None:
    """Main function of a worker process; signals that stop the run are left to its parent."""
    die_with_parent(parent_pid)
    sys.path[:] = json.loads(pipe.recv_bytes())
    make, arguments = pickle.loads(pipe.recv_bytes())
    with suppress(OSError):  # a busy machine would preempt its parent
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # Read at once, or both deadlock: the parent waits to send an item and this process to send a result.
    threading.Thread(target=_read_into, args=(pipe, inbox), daemon=True).start()
    work = make(*arguments)
    while (item := inbox.get()) is not None:
        try:
            result = (True, work(pickle.loads(item)))
        except Exception as error:
            result = (False, error)
        pipe.send_bytes(pickle.dumps(result, protocol=5))


def _read_into(pipe: Connection, inbox: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv_bytes())
    except (EOFError, OSError):
        inbox.put(None)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Connection(int(sys.argv[2])))
