"""Standard output and error that outlive their reader: a run continues when nobody reads them any more."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""The terminal was closed, or the pipe's reader left."""


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
