"""Rank 0's standard error, shown live at the launcher while the log keeps all of it."""

from __future__ import annotations

import io
import os
import re
from contextlib import suppress
from typing import TextIO

_REDRAW = re.compile(r"(\r\n|\n|\r|\x1b\[[0-9]*[KA])")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PlainLines:
    """Turns what a terminal gets into lines for a log: what a bar draws and overdraws is left out."""

    def __init__(self) -> None:
        self._line = ""

    def feed(self, text: str) -> str:
        """The lines that ``text`` completes."""
        done = []
        for piece in _REDRAW.split(text):
            if piece in ("\n", "\r\n"):
                done.append(self._line + "\n")
                self._line = ""
            elif _REDRAW.fullmatch(piece):  # back to the line's start, or erased
                self._line = ""
            else:
                self._line += _ESCAPES.sub("", piece)
        return "".join(done)


class LiveStream(io.TextIOBase):
    """A text stream that writes to the launcher's standard error and, as plain lines, to the rank's log.

    Args:
        log: the rank's own standard error.
        fd: a descriptor of the launcher's standard error.
    """

    encoding = "utf-8"

    def __init__(self, log: TextIO, fd: int) -> None:
        self._log, self._fd = log, fd
        self._plain = PlainLines()
        self._shown = True

    def write(self, text: str) -> int:
        lines = self._plain.feed(text)
        with suppress(OSError):  # on a full disk the saving of a checkpoint says so, in its own words
            self._log.write(lines)
        data = text.encode("utf-8", "replace")
        try:
            while self._shown and data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._shown = False  # the terminal or the pipe's reader went away; the run goes on
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True
