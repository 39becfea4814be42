"""Orphan guard: a process that kills the children of workers after the launcher and the workers are gone.

A worker killed by the kernel (:mod:`mgpu_pipe.system.process_end`) leaves its children behind. This process reads the
workers' process groups from a pipe and kills the remaining groups once the launcher's end closes. As a program it
imports nothing of this package, so that it starts within milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


class OrphanGuard:
    """Launcher's side of the guard, one per attempt; may be closed twice."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[read_fd],
                start_new_session=True,
            )
        finally:
            os.close(read_fd)

    def watch(self, process_group: int) -> None:
        self._write(f"+{process_group}\n")

    def dismiss(self, process_group: int) -> None:
        """Forget a group; call it before its leader is reaped, because its ID may be reused afterwards."""
        self._write(f"-{process_group}\n")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._process.wait()

    def _write(self, word: str) -> None:
        try:
            os.write(self.fd, word.encode())
        except BrokenPipeError:
            return  # the guard was killed; parent-death signals and lifelines remain


def main(fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(fd, encoding="ascii") as words:
        for word in words:
            (groups.add if word[0] == "+" else groups.discard)(int(word[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main(int(sys.argv[1]))
