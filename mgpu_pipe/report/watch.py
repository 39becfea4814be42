"""Serves a report on this machine's loopback address, made anew whenever its runs' files changed.

Only who can reach the loopback address gets it, and only under its name: a page of another site that a browser was
tricked into sending here (DNS rebinding) names another host and is refused.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.report.html import render
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.lock import is_held

HOST = "127.0.0.1"
NAMES = {HOST, "localhost"}


class ReportServer(ThreadingHTTPServer):
    """``/`` is the report of ``runs``, ``/1``, ``/2`` ... that of each where there are several.

    Raises:
        BadInputError: the port is in use, or not this user's to take.
    """

    daemon_threads = True

    def __init__(self, runs: list[RunPaths], port: int) -> None:
        self.pages = {"/": runs}
        if len(runs) > 1:
            self.pages |= {f"/{number}": [run] for number, run in enumerate(runs, 1)}
        self._made: dict[str, tuple[str, bytes]] = {}
        self._making = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            told = getattr(error, "strerror", None) or error
            raise BadInputError(
                f"--port {port}: cannot serve there ({told}); give another, or 0 for a free one"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def page(self, path: str, known: str) -> tuple[str, bytes]:
        """A page and the tag of its runs' files, or nothing beside the tag where that is ``known``."""
        runs = self.pages[path]
        tag = _tag(runs)
        if tag == known:
            return tag, b""
        with self._making:
            if self._made.get(path, ("", b""))[0] != tag:
                links = [f"/{number}" for number in range(1, len(runs) + 1)]
                self._made[path] = tag, render([load_run(run) for run in runs], links, tag).encode()
            return self._made[path]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES and self.headers.get("Host") not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path not in self.server.pages:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer()

    def _answer(self) -> None:
        try:
            tag, body = self.server.page(self.path, self.headers.get("If-None-Match", ""))
        except (MgpuError, OSError) as error:  # the folder is being moved or deleted
            tag, body, status, kind = "", str(error).encode(), HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain"
        else:
            status, kind = HTTPStatus.OK if body else HTTPStatus.NOT_MODIFIED, "text/html"
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("ETag", tag),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Nothing: each look of the page would be a line."""


def _tag(runs: list[RunPaths]) -> str:
    """Changes whenever a file changes that the report reads."""
    told = [(run.root, is_held(run.lock), [_stamp(path) for path in _read_by_a_report(run)]) for run in runs]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _read_by_a_report(run: RunPaths) -> Iterable[Path]:
    yield from (run.config, run.overrides, run.environment, run.metrics, run.summary, run.checkpoints)
    yield from sorted(run.logs.glob("*"))
    yield from sorted(run.checkpoints.glob("*/manifest.json"))


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path.name, 0, 0
    return path.name, status.st_mtime_ns, status.st_size
