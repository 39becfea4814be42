"""Program of the embedded server: ``... FOLDER NAME HOST FD DEVICE``, its token in ``MGPU_PIPE_SERVE_TOKEN``.

It listens on the socket of the descriptor ``FD``, which its parent has bound.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from threading import Thread
from typing import NoReturn

import uvicorn

from mgpu_pipe.inference.model_arguments import silence_transformers
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.serving.engines.transformers import TOKEN
from mgpu_pipe.serving.server.answerer import Answerer
from mgpu_pipe.serving.server.app import build_app
from mgpu_pipe.serving.server.slow_clients import BoundedProtocol


def main(folder: str, name: str, host: str, fd: str, device: str) -> NoReturn:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    token = os.environ.pop(TOKEN, "") or None
    silence_transformers()
    answerer = Answerer(load_run(folder, device))
    app = build_app(answerer, name, token, host)
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
