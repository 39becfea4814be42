"""Whole runs of the command in processes that imported everything already: a world as torchrun makes one.

Each process calls the program's own ``main``; only the launcher's processes are missing, which import nothing heavy.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.processes import preloaded


def _entry(rank: int, world_size: int, port: int, cwd: str, cache: str, arguments: list[str], log: str) -> None:
    os.chdir(cwd)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        MGPU_PIPE_CACHE=cache,
        OMP_NUM_THREADS="1",
    )
    from mgpu_pipe.cli.main import main

    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out: none takes it before rank 0 does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class JoinedRun:
    """One launch of the command with ``arguments`` on ``world_size`` processes; their output is in ``log``."""

    def __init__(self, world_size: int, cwd: Path, cache: Path, log: Path, *arguments: str) -> None:
        self.log = log
        port = free_port()
        words = [*arguments, f"trainer.devices={world_size}"]
        self.processes: list[Any] = [
            preloaded().Process(target=_entry, args=(rank, world_size, port, str(cwd), str(cache), words, str(log)))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    @property
    def ended(self) -> bool:
        """Whether any process has ended by itself."""
        return any(process.exitcode is not None for process in self.processes)

    def wait(self, timeout_s: float = 240.0) -> list[int]:
        """Exit codes, once all have ended."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, f"still running:\n{self.said()[-3000:]}"
        finally:
            self.signal(signal.SIGKILL)
        return [process.exitcode for process in self.processes]

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all, and wait for their ends."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""
