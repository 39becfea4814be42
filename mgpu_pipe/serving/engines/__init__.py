"""Engines that answer with a model's folder: a file each, with its ``ENGINE``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINES = ("transformers", "vllm", "sglang", "llama_cpp")


@dataclass(frozen=True)
class EngineRequest:
    """A model for an engine, and the address to serve it at.

    Attributes:
        folder: of the exported model.
        name: of the model in requests.
        fd: descriptor of the listening socket; None for an engine that binds ``port`` itself.
        device: ``cpu``, ``cuda`` or ``cuda:<number>``.
        python: interpreter of the engine's environment.
    """

    folder: Path
    name: str
    host: str
    port: int
    fd: int | None
    device: str
    python: Path
    token: str | None


@dataclass(frozen=True)
class EngineCommand:
    """A command line, and variables that are added to the environment; the token is among these."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        name: one of ``ENGINES``.
        format: of the export that it reads, ``hf`` or ``gguf``.
        listens: whether it takes a listening socket.
        is_exact: whether its greedy answers in fp32 must equal the run's.
        require: refuses an interpreter's environment without the engine, with the line that installs it.
        command: the engine's own command line.
    """

    name: str
    format: str
    listens: bool
    is_exact: bool
    require: Callable[[Path], None]
    command: Callable[[EngineRequest], EngineCommand]


def find_engine(name: str) -> Engine:
    """The engine ``name``, one of ``ENGINES``."""
    module: Any = importlib.import_module(f"{__name__}.{name}")
    engine: Engine = module.ENGINE
    return engine
