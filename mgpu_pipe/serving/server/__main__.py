"""Program of the embedded server: ``... FOLDER NAME HOST FD DEVICE [ADAPTER=FOLDER ...]``.

Its token is in ``MGPU_PIPE_SERVE_TOKEN``.

It listens on the socket of the descriptor ``FD``, which its parent has bound.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mgpu_pipe.errors import MgpuError, one_line
from mgpu_pipe.inference.model_arguments import silence_transformers
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.serving.engines.transformers import TOKEN
from mgpu_pipe.serving.server.answerer import Answerer, with_adapter
from mgpu_pipe.serving.server.app import build_app

REQUEST_S = 10.0
"""Time for the head of a request, from its connection or the previous answer on."""
READ_S = 30.0
"""Time in which a client must read what fills the send buffer."""
MAX_CONNECTIONS = 4096


class BoundedProtocol(H11Protocol):
    """One connection, aborted when its client is too slow; bodies are bounded where they are read."""

    _request_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._request_timer = self.loop.call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering() and self._request_timer is not None:
            self._request_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_timers()
        if not self._is_answering():  # else the next request was there already
            self._request_timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timers()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_timers(self) -> None:
        for timer in (self._request_timer, self._read_timer):
            if timer is not None:
                timer.cancel()


def main(folder: str, name: str, host: str, fd: str, device: str, *adapters: str) -> NoReturn:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    token = os.environ.pop(TOKEN, "") or None
    silence_transformers()
    run = load_run(folder, device)
    models = {name: run.model}
    for adapter, _, place in (word.partition("=") for word in adapters):
        try:
            models[adapter] = with_adapter(run.model, Path(place))
        except MgpuError as error:
            sys.exit(f"--adapter={adapter}={place}: {one_line(error)}")
    answerer = Answerer(run, models)
    app = build_app(answerer, token, host)
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
    )
    listener = socket.socket(fileno=int(fd))
    Thread(target=_listen, args=(uvicorn.Server(config), listener), daemon=True).start()
    answerer.work()


def _listen(server: uvicorn.Server, listener: socket.socket) -> NoReturn:
    """Answer until the process ends; a server that ends by itself ends the process."""
    try:
        server.run([listener])
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
