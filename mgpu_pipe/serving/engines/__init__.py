"""Engines that answer with a model's folder: a file each, with its ``ENGINE``."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.serving.adapters import NamedAdapter
from mgpu_pipe.serving.sizes import EngineSizes
from mgpu_pipe.system.local_files import expand_home

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
