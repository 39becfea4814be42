"""Engines that answer with a model's folder, a file each with its ``ENGINE``, and their GPUs and caches."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.serving.source import NamedAdapter
from mgpu_pipe.system.local_files import expand_home

ITEM_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "q8_0": 34 / 32, "q4_k": 4.9 / 8}
"""Bytes of a weight; a block of q8_0 has 32 values and a scale, and Q4_K_M keeps some tensors in Q6_K."""
CACHE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "q8_0": 2, "q4_k": 2}
"""Bytes of a value of the key-value cache."""
OVERHEAD_BYTES = 1.5e9
"""A GPU's CUDA context, activations and graphs next to weights and cache; vLLM logs about as much."""
DEFAULT_CONTEXT = 4096
"""Tokens where the model's configuration names no limit."""


@dataclass(frozen=True)
class Gpus:
    """GPUs of the engine's machine: their number, and the bytes of each. Without any the engine runs on the CPU.

    Attributes:
        ranks: GPUs, or processes on the CPU, that share each layer; None for the fewest that hold the model.
    """

    count: int
    memory: int
    ranks: int | None = None


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine.

    Attributes:
        tensor_parallel: GPUs, or processes on the CPU, that share each layer.
        context: most tokens of a prompt and its answer.
        concurrency: requests that are computed together.
        cache_bytes: of all key-value caches, together on all GPUs.
        gpu_bytes: that one GPU needs; 0 on the CPU.
    """

    tensor_parallel: int
    context: int
    concurrency: int
    cache_bytes: int
    gpu_bytes: int


def model_context(fields: Mapping[str, Any]) -> int | None:
    """Most tokens of the model; None where its configuration names no limit."""
    limit = fields.get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def choose_context(fields: Mapping[str, Any], wanted: int | None) -> int:
    """The context to serve; BadInputError if it is longer than the model's."""
    limit = model_context(fields)
    if wanted is not None and limit is not None and wanted > limit:
        raise BadInputError(f"--context={wanted}: the model was made for {limit} tokens; give at most that")
    return wanted or limit or DEFAULT_CONTEXT


def cache_bytes_per_token(shape: Shape, dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * shape.layers * shape.key_value_heads * shape.head_dim * CACHE_BYTES[dtype]


def choose_sizes(
    fields: Mapping[str, Any],
    elements: int,
    dtype: str,
    context: int,
    concurrency: int,
    gpus: Gpus,
    share: float,
    draft: tuple[Mapping[str, Any], int] | None = None,
) -> EngineSizes:
    """The requested GPUs, else the fewest that hold weights and caches; their number divides the heads.

    Args:
        elements: numbers in the weights.
        share: of each GPU's memory that the engine may take.
        draft: fields and elements of a draft model, which is split and cached as the model is.

    Raises:
        BadInputError: the GPUs do not hold them, or their number does not divide the heads.
    """
    models = [(fields, elements), *([] if draft is None else [draft])]
    shapes = [Shape.from_fields(fields) for fields, _ in models]
    weights = int(sum(elements for _, elements in models) * ITEM_BYTES[dtype])
    cache = sum(cache_bytes_per_token(shape, dtype) for shape in shapes) * context * concurrency
    if gpus.ranks is not None and not all(divides_heads(shape, gpus.ranks) for shape in shapes):
        raise BadInputError(f"--tensor-parallel={gpus.ranks}: the attention heads do not divide by it; choose another")
    if not gpus.count:
        return EngineSizes(gpus.ranks or 1, context, concurrency, cache, 0)
    if (gpus.ranks or 1) > gpus.count:
        raise BadInputError(f"--tensor-parallel={gpus.ranks}: there are {gpus.count} GPUs; give at most that")
    needed = 0
    for ranks in range(1, gpus.count + 1) if gpus.ranks is None else (gpus.ranks,):
        if not all(divides_heads(shape, ranks) for shape in shapes):
            continue
        copies = max(
            1, ranks // min(shape.key_value_heads for shape in shapes)
        )  # fewer heads than GPUs: several GPUs hold the same
        needed = int((weights + cache * copies) / ranks + OVERHEAD_BYTES)
        if needed <= share * gpus.memory:
            return EngineSizes(ranks, context, concurrency, cache, needed)
    room = f"{share * gpus.memory / 1e9:.1f} GB of each of {gpus.count} GPU{'s' if gpus.count > 1 else ''}"
    raise BadInputError(
        f"--context={context} --concurrency={concurrency}: weights of {weights / 1e9:.1f} GB and caches of "
        f"{cache / 1e9:.1f} GB need {needed / 1e9:.1f} GB a GPU and "
        f"have {room}; lower them, use --dtype bf16, or more GPUs"
    )


def divides_heads(shape: Shape, ranks: int) -> bool:
    """Whether engines split attention over ``ranks``: whole heads each, and key-value heads whole or repeated."""
    keys = shape.key_value_heads
    return shape.heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


ENGINES = ("transformers", "vllm", "sglang", "llama_cpp")
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""The folder is complete; the engine asks nobody for the rest."""


@dataclass(frozen=True)
class EngineRequest:
    """A model for an engine, and the address to serve it at.

    Attributes:
        folder: of the exported model.
        name: of the model in requests.
        fd: descriptor of the listening socket; None for an engine that binds ``port`` itself.
        device: ``cpu``, ``cuda`` or ``cuda:<number>``.
        dtype: of the weights.
        memory_share: of each GPU's memory that the engine may take.
        draft: folder of a smaller model that proposes tokens; None for none.
        adapters: that requests choose by name.
    """

    folder: Path
    name: str
    host: str
    port: int
    fd: int | None
    device: str
    dtype: str
    sizes: EngineSizes
    memory_share: float
    token: str | None
    draft: Path | None = None
    adapters: Sequence[NamedAdapter] = ()


@dataclass(frozen=True)
class EngineCommand:
    """The words after an engine's program, and variables that are added to the environment."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        name: one of ``ENGINES``.
        format: of the export that it reads, ``hf`` or ``gguf``.
        dtypes: of the weights that it takes.
        program: its program as typed; empty for the embedded server.
        find: its program in an environment (None: this one, then PATH), or the line that installs it as an error.
        check: refuses a model's fields by ``(fields, is_on_gpu)``.
        command: the words after the program; they depend on the program.
    """

    name: str
    format: str
    dtypes: Sequence[str]
    program: Sequence[str]
    find: Callable[[Path | None], Sequence[str]]
    check: Callable[[Mapping[str, Any], bool], None]
    command: Callable[[EngineRequest, Sequence[str]], EngineCommand]

    @property
    def is_embedded(self) -> bool:
        """Whether it is the server of this package: it takes a listening socket, and its answers equal the run's."""
        return not self.program


def find_engine(name: str) -> Engine:
    """The engine ``name``, one of ``ENGINES``."""
    module: Any = importlib.import_module(f"{__name__}.{name}")
    engine: Engine = module.ENGINE
    return engine


def find_program(name: str, environment: Path | None) -> str | None:
    """The path of the program ``name`` in a virtual environment, or on PATH."""
    if environment is None:
        return shutil.which(name)
    file = expand_home(environment) / "bin" / name
    return str(file) if file.is_file() else None


def install_error(engine: str, environment: Path | None, packages: str, more: str = "") -> BadInputError:
    """The refusal of an engine that is not installed. Its packages need another torch, so it gets an environment."""
    place = environment or Path("~") / f"venv-{engine}"
    lines = f"python3 -m venv {place} && {place}/bin/pip install {packages}, then add --engine-env {place}"
    return BadInputError(f"--engine={engine}: is not installed{more}; {lines}")
