"""transformers behind the embedded server.

The server of transformers itself (``transformers serve``) has no token, loads any model that a request names, and takes
prompts longer than the context; the embedded one is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.serving.engines import TORCH_DTYPES, Engine, EngineCommand, EngineRequest

TOKEN = "MGPU_PIPE_SERVE_TOKEN"
"""Variable with the token, which command lines would show to every user of the machine."""


def _find(environment: Path | None) -> Sequence[str]:
    if environment is not None:
        raise BadInputError("--engine-env: is for engines that are installed apart; leave it out")
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise BadInputError(f"--engine=transformers: needs {' and '.join(missing)}; pip install 'mgpu_pipe[serve]'")
    return python_module("mgpu_pipe.serving.server")


def _check(fields: Mapping[str, Any], is_on_gpu: bool) -> None:
    """transformers takes every model that this package trains."""


def _command(request: EngineRequest, program: Sequence[str]) -> EngineCommand:
    words = [str(request.folder), request.name, request.host, str(request.fd), request.device]
    words += [adapter.word for adapter in request.adapters]
    return EngineCommand(words, {TOKEN: request.token or ""})


ENGINE = Engine("transformers", "hf", tuple(TORCH_DTYPES), (), _find, _check, _command)
