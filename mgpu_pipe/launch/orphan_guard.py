"""Ends what workers started, when the launcher is gone and the workers with it.

A worker that the kernel ends (parent_death.py) cannot take its own children along. This process can: it is told the
workers' process groups and, once the launcher's end of the pipe closes, ends every group that is left. Run as a
program it imports nothing of this package, so that it is there within milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


class OrphanGuard:
    """The launcher's side. There is one for each attempt; closing it twice is harmless."""

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
        self._tell(f"+{process_group}\n")

    def dismiss(self, process_group: int) -> None:
        """Forget a group; call it before its leader is reaped, after which its number may be another's."""
        self._tell(f"-{process_group}\n")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._process.wait()

    def _tell(self, word: str) -> None:
        try:
            os.write(self.fd, word.encode())
        except BrokenPipeError:
            return  # somebody ended the orphan guard; parent-death signals and lifelines remain


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
