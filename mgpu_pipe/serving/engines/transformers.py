"""transformers behind the embedded server.

The server of transformers itself (``transformers serve``) has no token, loads any model that a request names, and takes
prompts longer than the context; the embedded one is small.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.serving.engines import Engine, EngineCommand, EngineRequest

TOKEN = "MGPU_PIPE_SERVE_TOKEN"
"""Variable with the token, which command lines would show to every user of the machine."""


def _require(python: Path) -> None:
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise BadInputError(f"--engine=transformers: needs {' and '.join(missing)}; pip install 'mgpu_pipe[serve]'")


def _command(request: EngineRequest) -> EngineCommand:
    words = (str(request.folder), request.name, request.host, str(request.fd), request.device)
    environment = {TOKEN: request.token or ""}
    return EngineCommand(python_module("mgpu_pipe.serving.server", *words), environment)


ENGINE = Engine("transformers", "hf", True, True, _require, _command)
