"""Serves a report on this machine's loopback address, made anew whenever its runs' files changed.

Only who can reach the loopback address gets it, and only under its name: a page of another site that a browser was
tricked into sending here (DNS rebinding) names another host and is refused.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.report.html import render
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.lock import is_held

HOST = "127.0.0.1"
NAMES = {HOST, "localhost"}


class Served(Protocol):
    """A page that changes with the files that it is made from."""

    def tag(self) -> str:
        """Changes whenever one of them does."""

    def text(self, tag: str) -> str:
        """The page as it is now."""


class RunsPage:
    """The report of one run, or of several."""

    def __init__(self, runs: list[RunPaths]) -> None:
        self._runs = runs

    def tag(self) -> str:
        told = [(run.root, is_held(run.lock), stamps(_read_by_a_report(run))) for run in self._runs]
        return digest(told)

    def text(self, tag: str) -> str:
        return render([load_run(run) for run in self._runs], [f"/{at}" for at in range(1, len(self._runs) + 1)], tag)


def pages_of(runs: list[RunPaths]) -> Callable[[str], Served | None]:
    """``/`` is the report of ``runs``, ``/1``, ``/2`` ... that of each where there are several."""
    pages = {"/": RunsPage(runs)}
    if len(runs) > 1:
        pages |= {f"/{number}": RunsPage([run]) for number, run in enumerate(runs, 1)}
    return pages.get


class ReportServer(ThreadingHTTPServer):
    """Serves what ``find`` has for a path.

    Raises:
        BadInputError: the port is in use, or not this user's to take.
    """

    daemon_threads = True

    def __init__(self, find: Callable[[str], Served | None], port: int) -> None:
        self.find = find
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

    def page(self, path: str, page: Served, known: str) -> tuple[str, bytes]:
        """A page's tag and text, or nothing beside the tag where that is ``known``."""
        tag = page.tag()
        if tag == known:
            return tag, b""
        with self._making:
            if self._made.get(path, ("", b""))[0] != tag:
                self._made[path] = tag, page.text(tag).encode()
            return self._made[path]


def serve(find: Callable[[str], Served | None], port: int) -> None:
    """Serve until Ctrl-C."""
    with ReportServer(find, port) as server:
        print(f"report: {server.address} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES and self.headers.get("Host") not in NAMES:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif (page := self.server.find(self.path)) is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer(page)

    def _answer(self, page: Served) -> None:
        try:
            tag, body = self.server.page(self.path, page, self.headers.get("If-None-Match", ""))
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


def digest(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _read_by_a_report(run: RunPaths) -> Iterable[Path]:
    yield from (run.config, run.overrides, run.environment, run.metrics, run.summary, run.checkpoints)
    yield from sorted(run.logs.glob("*"))
    yield from sorted(run.checkpoints.glob("*/manifest.json"))


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What changes with each of these files."""
    return [_stamp(path) for path in files]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path.name, 0, 0
    return path.name, status.st_mtime_ns, status.st_size
