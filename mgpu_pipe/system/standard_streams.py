"""Keeps training when standard output or error is closed."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mgpu_pipe.errors import printable

GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""Errors of a closed terminal or pipe."""
STDERR = 2
LEFT_OVER_S = 5.0
"""Seconds for the last output of ended workers to arrive."""


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_logs_safely() -> None:
    """Remove control characters from log lines without a handler."""
    if isinstance(logging.lastResort, logging.Handler):
        logging.lastResort.setFormatter(_PrintableFormatter())


class OutlivingStream:
    """A text stream whose writes succeed even if its reader is gone or its disk is full."""

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

    def flush_or_drop(self) -> None:
        """Flush the rest or drop it: the interpreter's last flush must not change the exit code."""
        try:
            self._stream.flush()
        except OSError:
            self._to_nowhere()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _survive(self, error: OSError) -> None:
        if error.errno in GONE:  # a full disk may get room: the next write retries pending text
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        """Redirect pending and later text to /dev/null: the stream would retry it forever."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)


@contextmanager
def live_descriptor() -> Iterator[int]:
    """Descriptor for the workers' live output: standard error, or a pipe into another ``sys.stderr``."""
    stream = sys.stderr
    try:
        direct = stream.fileno() == STDERR
    except (OSError, ValueError, AttributeError):  # it has no descriptor
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
    with os.fdopen(read, encoding="utf-8", errors="replace", newline="") as pipe:
        for line in pipe:
            stream.write(line)
            stream.flush()


@contextmanager
def outliving_streams() -> Iterator[None]:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by streams that never fail."""
    usual = sys.stdout, sys.stderr
    streams = [OutlivingStream(stream) for stream in usual]
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", streams)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush_or_drop()
        sys.stdout, sys.stderr = usual


_STDERR = 2
_MAX_BYTES = 1 << 16
"""Limit of bytes read from standard error."""
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def library_output() -> Iterator[list[str]]:
    """Collects the lines that libraries write to standard error in the block; the list is filled at its end.

    It also takes the output of other threads, so keep the block short.
    """
    lines = list[str]()
    with _ONE_AT_A_TIME:
        taken = os.memfd_create("library_output", os.MFD_CLOEXEC)
        stderr_copy = _copy_of_stderr()
        os.dup2(taken, _STDERR)
        try:
            yield lines
        finally:
            if stderr_copy is None:
                os.close(_STDERR)
            else:
                os.dup2(stderr_copy, _STDERR)
                os.close(stderr_copy)
            lines += os.pread(taken, _MAX_BYTES, 0).decode(errors="replace").splitlines()
            os.close(taken)


def _copy_of_stderr() -> int | None:
    """Copy of the descriptor of standard error; None if it is closed."""
    try:
        return os.dup(_STDERR)
    except OSError:
        return None
