"""llama.cpp: ``llama-server``, or the server of the package llama-cpp-python.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md,
https://llama-cpp-python.readthedocs.io/en/latest/server/.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf import FILE
from mgpu_pipe.serving.engines import Engine, EngineCommand, EngineRequest, find_program, install_error
from mgpu_pipe.serving.source import OPTION
from mgpu_pipe.system.local_files import expand_home

MODULE = ("-m", "llama_cpp.server")
ALL_LAYERS = "999"
"""More layers on the GPU than any model has."""


def _find(environment: Path | None) -> Sequence[str]:
    program = find_program("llama-server", environment)
    if program is not None:
        return (program,)
    python = sys.executable if environment is None else find_program("python", environment)
    is_there = environment is not None and any(expand_home(environment).glob("lib/python3*/site-packages/llama_cpp"))
    if python is not None and (is_there or (environment is None and find_spec("llama_cpp"))):
        return (python, *MODULE)
    raise install_error("llama_cpp", environment, "'llama-cpp-python[server]'", " (no llama-server either)")


def _check(fields: Mapping[str, Any], is_on_gpu: bool) -> None:
    from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES

    if fields.get("model_type") not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise BadInputError(f"--engine=llama_cpp: {fields.get('model_type')} is none of {known}; use another --engine")


def _command(request: EngineRequest, program: Sequence[str]) -> EngineCommand:
    if request.adapters:
        reason = "llama.cpp chooses no adapter by the model of a request"
        raise BadInputError(f"{OPTION}={request.adapters[0].word}: {reason}; use another --engine, or merge it")
    sizes, file = request.sizes, str(request.folder / FILE)
    address = ["--host", request.host, "--port", str(request.port)]
    layers = ALL_LAYERS if sizes.gpu_bytes else "0"
    if tuple(program[1:]) == MODULE:
        if request.draft is not None:
            raise BadInputError(
                "--draft: the server of llama-cpp-python takes none; install llama-server, or leave it out"
            )
        words = ["--model", file, "--model_alias", request.name, *address]
        words += ["--n_ctx", str(sizes.context), "--n_gpu_layers", layers]
        return EngineCommand(words, {} if request.token is None else {"API_KEY": request.token})
    words = ["--model", file, "--alias", request.name, *address, "--n-gpu-layers", layers]
    words += ["--parallel", str(sizes.concurrency), "--ctx-size", str(sizes.context * sizes.concurrency)]
    if request.draft is not None:
        words += ["--model-draft", str(request.draft / FILE), "--gpu-layers-draft", layers]
    return EngineCommand(words, {} if request.token is None else {"LLAMA_API_KEY": request.token})


ENGINE = Engine(
    "llama_cpp", "gguf", ("fp32", "bf16", "fp16", "q8_0", "q4_k"), ("llama-server",), _find, _check, _command
)
