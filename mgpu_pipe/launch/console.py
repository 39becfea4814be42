"""Standard output and error that outlive their reader: a run continues when nobody reads them any more."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""The terminal was closed, or the pipe's reader left."""
STDERR = 2
LEFT_OVER_S = 5.0
"""How long what workers wrote last may take to arrive: they are gone by then."""


class OutlivingStream:
    """A text stream that can be written to even when its reader is gone or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._survive(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._survive(error)

    def settle(self) -> None:
        """Write out what is left, or drop it: the interpreter's own last flush must not change the exit code."""
        try:
            self._stream.flush()
        except OSError:
            self._to_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _survive(self, error: OSError) -> None:
        if error.errno in GONE:  # a full disk may have room again; what is pending is tried with the next write
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        """Send what is pending, and all that follows, to /dev/null: the stream would retry it for ever."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)


@contextmanager
def live_descriptor() -> Iterator[int]:
    """A descriptor that what workers show is written to, and that leads to ``sys.stderr``.

    That is standard error itself or, where ``sys.stderr`` leads elsewhere (a notebook's cell), a pipe into it.
    """
    stream = sys.stderr
    try:
        direct = stream.fileno() == STDERR
    except (OSError, ValueError, AttributeError):  # it has none
        direct = False
    if direct:
        descriptor = os.dup(STDERR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    read, write = os.pipe()
    pump = threading.Thread(target=_pump, args=(read, stream), name="live output", daemon=True)
    pump.start()
    try:
        yield write
    finally:
        os.close(write)
        pump.join(LEFT_OVER_S)


def _pump(read: int, stream: TextIO) -> None:
    with os.fdopen(read, encoding="utf-8", errors="replace", newline="") as shown:
        for line in shown:
            stream.write(line)
            stream.flush()


@contextmanager
def outliving_streams() -> Iterator[None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that never fail."""
    usual = sys.stdout, sys.stderr
    streams = [OutlivingStream(stream) for stream in usual]
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", streams)
    try:
        yield
    finally:
        for stream in streams:
            stream.settle()
        sys.stdout, sys.stderr = usual
