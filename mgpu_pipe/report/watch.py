"""Serves a report on this machine's loopback address and renders it again after its runs' files change.

Every user of the machine can reach that address, so the page's path begins with a random token that is only printed.
The server refuses other host names, which protects from DNS rebinding by other sites.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.errors import BadInputError, MgpuError, print_line
from mgpu_pipe.report.html import render
from mgpu_pipe.report.run_view import load_run
from mgpu_pipe.runs.lock import is_held

HOST = "127.0.0.1"
NAMES = {HOST, "localhost"}


class Served(Protocol):
    """A page that changes with its source files."""

    def tag(self) -> str:
        """A tag that changes whenever a source file does."""

    def text(self, tag: str) -> str:
        """The current text of the page."""


class RunsPage:
    """The report of one run or of several."""

    def __init__(self, runs: list[RunPaths]) -> None:
        self._runs = runs

    def tag(self) -> str:
        return digest([(run.root, is_held(run.lock), stamps(_files_of_report(run))) for run in self._runs])

    def text(self, tag: str) -> str:
        return render(
            [load_run(run) for run in self._runs], [f"./{number}" for number in range(1, len(self._runs) + 1)], tag
        )


def pages_of(runs: list[RunPaths]) -> Callable[[str], Served | None]:
    """Finds pages by path: ``/`` is the report of ``runs``; with several runs, ``/1``, ``/2`` ... are those of each."""
    pages = {"/": RunsPage(runs)}
    if len(runs) > 1:
        pages |= {f"/{number}": RunsPage([run]) for number, run in enumerate(runs, 1)}
    return pages.get


class ReportServer(ThreadingHTTPServer):
    """Serves the pages that ``find`` returns for paths below the server's token.

    Raises:
        BadInputError: the port is in use or needs other rights.
    """

    daemon_threads = True

    def __init__(self, find: Callable[[str], Served | None], port: int) -> None:
        self._find = find
        self._root = f"/{secrets.token_urlsafe()}"
        self._pages: dict[str, tuple[str, bytes]] = {}
        self._render_lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInputError(
                f"--port {port}: cannot serve there ({reason}); give another, or 0 for a free one"
            ) from error

    @property
    def address(self) -> str:
        """The page's address with the token; everyone who has it may read the page."""
        return f"http://{HOST}:{self.server_port}{self._root}/"

    def find(self, path: str) -> Served | None:
        """The page at ``path``; None without this server's token."""
        root, page = path[: len(self._root)], path[len(self._root) :]
        known = secrets.compare_digest(root.encode(), self._root.encode())
        return self._find(page) if known and page.startswith("/") else None

    def page(self, path: str, page: Served, known: str) -> tuple[str, bytes]:
        """A page's tag and text; the text is empty if the tag equals ``known``."""
        tag = page.tag()
        if tag == known:
            return tag, b""
        with self._render_lock:
            if self._pages.get(path, ("", b""))[0] != tag:
                self._pages[path] = tag, page.text(tag).encode()
            return self._pages[path]


def serve(find: Callable[[str], Served | None], port: int) -> None:
    """Serve until Ctrl-C."""
    with ReportServer(find, port) as server:
        print_line(f"report: {server.address} (Ctrl-C ends it)", flush=True)
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
        except (MgpuError, OSError) as error:  # the folder was moved or deleted meanwhile
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
            ("Referrer-Policy", "no-referrer"),  # links to other sites must not send the token
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Logs nothing, because the page asks the server often."""


def digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _files_of_report(run: RunPaths) -> Iterable[Path]:
    yield from (run.config, run.overrides, run.environment, run.metrics, run.summary, run.checkpoints)
    yield from sorted(run.logs.glob("*"))
    yield from sorted(run.checkpoints.glob("*/manifest.json"))


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, modification time and size of each file; zeros for a missing one."""
    return [_stamp(path) for path in files]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return path.name, 0, 0
    return path.name, status.st_mtime_ns, status.st_size
