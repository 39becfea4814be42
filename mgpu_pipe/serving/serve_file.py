"""Reads ``serve.yaml``, several models for one machine, and divides the machine's GPUs among them by need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mgpu_pipe.errors import BadInputError, one_line
from mgpu_pipe.serving.engines import Gpus
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes

KEYS = (
    *("folder", "engine", "name", "host", "port", "dtype", "context", "concurrency", "engine_env", "weights"),
    *("frozen_weights", "device", "draft", "adapter", "tensor_parallel"),
)
"""Keys of a model: the options of ``serve``."""


@dataclass(frozen=True)
class Need:
    """GPUs that a model needs: their number, and the bytes on each; without any, bytes of the host's memory."""

    gpus: int
    nbytes: int


@dataclass(frozen=True)
class GpuShare:
    """Numbers of the GPUs that a model gets, and its share of the memory of each."""

    devices: tuple[int, ...]
    share: float


def read_serve_file(file: Path) -> list[list[str]]:
    """The words of ``serve`` for each model of ``file``: ``models: [{folder: ..., engine: ..., port: ...}, ...]``.

    Raises:
        BadInputError: the file is missing or not of this form, or two models have one name or port.
    """
    try:
        content = parse_yaml(read_bytes(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInputError(f"{file}: cannot be read as YAML ({one_line(error)}); correct it") from error
    models = content.get("models") if isinstance(content, dict) and set(content) == {"models"} else None
    if not isinstance(models, list) or not models:
        raise BadInputError(f"{file}: has no list of models; write models: [{{folder: outputs/run, port: 8001}}]")
    for key in ("name", "port"):
        values = [model.get(key, "") for model in models if isinstance(model, dict)]
        twice = [value for value in values if value not in ("", 0) and values.count(value) > 1]
        if twice:
            raise BadInputError(f"{file}: {key}={twice[0]} stands twice; give each model its own")
    return [_words(model, f"{file}: models[{number}]") for number, model in enumerate(models)]


def _words(model: object, where: str) -> list[str]:
    if not isinstance(model, dict) or not isinstance(model.get("folder"), str) or "port" not in model:
        raise BadInputError(f"{where}: has no folder or no port; give both")
    unknown = sorted(map(str, set(model) - set(KEYS)))
    if unknown:
        raise BadInputError(f"{where}.{unknown[0]}: no such key; use {', '.join(KEYS)}")
    words = [model["folder"]]
    for key, value in model.items():
        values = value if key == "adapter" and isinstance(value, list) else [value]
        if any(isinstance(each, bool) or not isinstance(each, (str, int)) for each in values):
            raise BadInputError(f"{where}.{key}={value}: is neither a text nor a number; correct it")
        words += [] if key == "folder" else [f"--{key.replace('_', '-')}={each}" for each in values]
    return words


def check_host(needs: Sequence[Need], memory: int) -> None:
    """Raise BadInputError for models on the CPU that the host's memory does not hold."""
    wanted = sum(need.nbytes for need in needs if not need.gpus)
    if wanted > memory:
        raise BadInputError(
            f"serve.yaml: its models need {wanted / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB; leave one "
            "out, or lower context, concurrency or dtype"
        )


def share_gpus(needs: Sequence[Need], gpus: Gpus, limit: float) -> list[GpuShare]:
    """GPUs and memory shares of each model: the largest first, each on the emptiest GPUs; what is left over is divided
    by need.

    Args:
        limit: most that all models together take of a GPU.

    Raises:
        BadInputError: they do not fit.
    """
    room = limit * gpus.memory
    taken = [0.0] * gpus.count
    devices: dict[int, tuple[int, ...]] = {}
    for number in sorted(range(len(needs)), key=lambda number: (-needs[number].gpus, -needs[number].nbytes)):
        need = needs[number]
        chosen = tuple(sorted(sorted(range(gpus.count), key=lambda gpu: taken[gpu])[: need.gpus]))
        for gpu in chosen:
            taken[gpu] += need.nbytes
        if len(chosen) < need.gpus or any(taken[gpu] > room for gpu in chosen):
            wanted = ", ".join(f"{need.gpus} x {need.nbytes / 1e9:.1f} GB" for need in needs)
            raise BadInputError(
                f"serve.yaml: its models need {wanted}, and {gpus.count} GPUs have {room / 1e9:.1f} GB each; leave one "
                "out, or lower context, concurrency or dtype"
            )
        devices[number] = chosen
    return [
        GpuShare(devices[number], min(limit * need.nbytes / taken[gpu] for gpu in devices[number]))
        for number, need in enumerate(needs)
    ]
