"""Work for a few processes, whose results come in order. Everything goes through pipes.

The standard library's pools and torch's loader make named semaphores, which stay in ``/dev/shm`` when their processes
are killed together. A pipe has no name: nothing is left, whoever is killed. What goes through it is pickled, between
this process and its own children alone, as multiprocessing does; its own pickler would put tensors in shared memory.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeVar

from mgpu_pipe.child import die_with_parent
from mgpu_pipe.errors import WorkerError

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
    """What ``make(*arguments)``, called once in each of ``count`` processes, returns for each item.

    The processes are spawned, for this one may have threads whose locks a fork would copy. They end with this process,
    which must iterate in its main thread, and with the iteration.

    Args:
        make: a function of a module, as are those that it returns.
        ahead: items a process is given before the first result is asked for.
        what: names such a process, and what to do where one dies, in an error.

    Raises:
        WorkerError: a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    results: list[_Results] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(os.getpid(), theirs, make, arguments), daemon=True)
            with _without_main():
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
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
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for one in results:
            one.join()  # its process is gone, and with it the other end of the pipe
        for pipe in pipes:
            pipe.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Nothing that is sent lies in the program itself: a process that imported it would run a user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _send(pipe: Connection, item: object, what: str) -> None:
    try:
        pipe.send_bytes(pickle.dumps(item, protocol=5))
    except OSError as error:
        raise WorkerError(what) from error


class _Results(threading.Thread):
    """Reads what a process sends as it comes: a pipe holds little, and who asks would wait for the rest."""

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


def _serve(parent_pid: int, pipe: Connection, make: Callable[..., Callable[[Any], Any]], arguments: Any) -> None:
    """A process's life: what stops the run is its parent's to answer."""
    die_with_parent(parent_pid)
    with suppress(OSError):  # woken by its parent it would take the parent's place on a busy machine
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    # Read at once: a parent that waits for its item to be taken could not take a result, which this process waits for.
    threading.Thread(target=_read_into, args=(pipe, given), daemon=True).start()
    work = make(*arguments)
    while (item := given.get()) is not None:
        try:
            result = (True, work(pickle.loads(item)))
        except Exception as error:
            result = (False, error)
        pipe.send_bytes(pickle.dumps(result, protocol=5))


def _read_into(pipe: Connection, given: queue.SimpleQueue[bytes | None]) -> None:
    try:
        while True:
            given.put(pipe.recv_bytes())
    except (EOFError, OSError):
        given.put(None)
