"""vLLM: ``vllm serve``. Source: https://docs.vllm.ai/en/latest/cli/serve/."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.serving.engines import (
    OFFLINE,
    TORCH_DTYPES,
    Engine,
    EngineCommand,
    EngineRequest,
    find_program,
    install_error,
)
from mgpu_pipe.serving.source import OPTION, refuse_extra

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Of vllm/v1/attention/backends/cpu_attn.py."""
GPU_HEAD_MULTIPLE, GPU_HEAD_MAX = 8, 256
"""Of vllm/v1/attention/backends/flash_attn.py."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vllm/config/lora.py."""
DRAFT_TOKENS = 5
"""Tokens that a draft model proposes at a time, as in https://docs.vllm.ai/en/latest/features/speculative_decoding/."""


def _find(environment: Path | None) -> Sequence[str]:
    program = find_program("vllm", environment)
    if program is None:
        raise install_error("vllm", environment, "vllm")
    return (program,)


def _check(fields: Mapping[str, Any], is_on_gpu: bool) -> None:
    size = Shape.from_fields(fields).head_dim
    if is_on_gpu:
        fits, sizes = size % GPU_HEAD_MULTIPLE == 0 and size <= GPU_HEAD_MAX, "multiples of 8 up to 256"
    else:
        fits, sizes = size in CPU_HEAD_SIZES, f"on CPUs {', '.join(map(str, CPU_HEAD_SIZES))}"
    if not fits:
        raise BadInputError(f"--engine=vllm: heads of {size} are none of its sizes ({sizes}); use another --engine")


def _command(request: EngineRequest, program: Sequence[str]) -> EngineCommand:
    """Words and environment that start vLLM; BadInputError for adapters that it cannot take."""
    sizes = request.sizes
    words = [
        *("serve", str(request.folder), "--served-model-name", request.name),
        *("--host", request.host, "--port", str(request.port), "--dtype", TORCH_DTYPES[request.dtype]),
        *("--max-model-len", str(sizes.context), "--max-num-seqs", str(sizes.concurrency)),
        *("--tensor-parallel-size", str(sizes.tensor_parallel)),
    ]
    if request.draft is not None:
        draft = {"method": "draft_model", "model": str(request.draft), "num_speculative_tokens": DRAFT_TOKENS}
        words += ["--speculative-config", json.dumps(draft)]
    if request.adapters:
        refuse_extra("vllm", request.adapters)
        rank = max(adapter.rank for adapter in request.adapters)
        if rank > LORA_RANKS[-1]:
            raise BadInputError(f"{OPTION}: has rank {rank}, and vllm takes {LORA_RANKS[-1]} at most; merge it")
        words += ["--enable-lora", "--max-loras", str(len(request.adapters))]
        words += ["--max-lora-rank", str(next(size for size in LORA_RANKS if size >= rank))]
        words += ["--lora-modules", *(adapter.word for adapter in request.adapters)]
    environment = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1"}
    if sizes.gpu_bytes:
        words += ["--gpu-memory-utilization", f"{request.memory_share:g}"]
    else:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(sizes.cache_bytes / 2**30)))  # GiB
        if sizes.tensor_parallel > 1:  # it binds a process to each NUMA node, and ends where there are fewer
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if request.token is not None:
        environment["VLLM_API_KEY"] = request.token
    return EngineCommand(words, environment)


ENGINE = Engine("vllm", "hf", tuple(TORCH_DTYPES), ("vllm",), _find, _check, _command)
