"""SGLang: ``python -m sglang.launch_server``. Source: https://docs.sglang.ai/advanced_features/server_arguments.html."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgpu_pipe.serving.engines import (
    OFFLINE,
    TORCH_DTYPES,
    Engine,
    EngineCommand,
    EngineRequest,
    find_program,
    install_error,
)
from mgpu_pipe.serving.source import refuse_extra
from mgpu_pipe.system.local_files import expand_home

MODULE = ("-m", "sglang.launch_server")


def _find(environment: Path | None) -> Sequence[str]:
    python = sys.executable if environment is None else find_program("python", environment)
    is_there = environment is not None and any(expand_home(environment).glob("lib/python3*/site-packages/sglang"))
    if python is None or not (is_there or (environment is None and find_spec("sglang"))):
        raise install_error("sglang", environment, "sglang")
    return (python, *MODULE)


def _check(fields: Mapping[str, Any], is_on_gpu: bool) -> None:
    """SGLang names no head sizes that it refuses."""


def _command(request: EngineRequest, program: Sequence[str]) -> EngineCommand:
    sizes = request.sizes
    words = [
        *("--model-path", str(request.folder), "--served-model-name", request.name),
        *("--host", request.host, "--port", str(request.port), "--dtype", TORCH_DTYPES[request.dtype]),
        *("--context-length", str(sizes.context), "--max-running-requests", str(sizes.concurrency)),
        *("--tp-size", str(sizes.tensor_parallel)),
    ]
    if sizes.gpu_bytes:
        words += ["--mem-fraction-static", f"{request.memory_share:g}"]
    else:
        words += ["--device", "cpu"]
    if request.draft is not None:
        words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(request.draft)]
    if request.adapters:
        refuse_extra("sglang", request.adapters)
        words += ["--enable-lora", "--max-loras-per-batch", str(len(request.adapters) + 1)]  # one without any
        words += ["--lora-paths", *(adapter.word for adapter in request.adapters)]
    if request.token is not None:
        words += ["--api-key", request.token]  # it reads no variable: other users of the machine see it
    return EngineCommand(words, OFFLINE)


ENGINE = Engine("sglang", "hf", tuple(TORCH_DTYPES), ("python", *MODULE), _find, _check, _command)
