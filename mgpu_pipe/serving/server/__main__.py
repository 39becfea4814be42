"""Program of the embedded server: ``... FOLDER NAME HOST FD DEVICE [ADAPTER=FOLDER ...]``.

Its token is in ``MGPU_PIPE_SERVE_TOKEN``.

It listens on the socket of the descriptor ``FD``, which its parent has bound.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path
from threading import Thread
from typing import NoReturn

import uvicorn

from mgpu_pipe.errors import MgpuError, one_line
from mgpu_pipe.inference.model_arguments import silence_transformers
from mgpu_pipe.inference.named_adapters import with_adapter
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.serving.engines.transformers import TOKEN
from mgpu_pipe.serving.server.answerer import Answerer
from mgpu_pipe.serving.server.app import build_app
from mgpu_pipe.serving.server.slow_clients import BoundedProtocol


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
