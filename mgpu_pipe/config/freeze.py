"""Freezes a configuration to a file, reads it back, and gives it an identity."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.interpolation import escaped, plain_values
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors

HEADER = "# The run's configuration, composed once; every worker reads it from here.\n"
HASH_LENGTH = 16


def freeze(config: RunConfig, path: Path) -> None:
    """Write ``config`` as YAML, whole or not at all.

    Texts of the environment (``${oc.env:...}``) are written as the interpolation, never as their value.
    """
    text = HEADER + yaml.safe_dump(escaped(_with_interpolations(config)), sort_keys=False, allow_unicode=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path) -> RunConfig:
    """Read a frozen configuration; interpolations are resolved from this process's environment.

    Raises:
        BadInputError: the file is missing or is not YAML.
        ConfigErrors: it does not fit the schema, or names an environment variable that is not set.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: not a readable configuration ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path}: not a configuration, for it is no mapping; give a run's config.yaml")
    resolved, errors = plain_values(OmegaConf.create(values))
    config, mistyped = convert(RunConfig, resolved)
    if errors or mistyped:
        raise ConfigErrors([*errors, *mistyped])
    return config


def config_hash(config: RunConfig, length: int = HASH_LENGTH) -> str:
    """Hexadecimal identity of a configuration: the start of the SHA-256 of its sorted JSON.

    It depends on what is written, so not on the values of the environment.
    """
    text = json.dumps(to_plain(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _with_interpolations(config: RunConfig) -> dict[str, object]:
    """Nested plain values that still hold texts of the environment as such, for :func:`escaped`."""
    from dataclasses import fields, is_dataclass

    def plain(node: object) -> dict[str, object]:
        return {
            field.name: plain(value) if is_dataclass(value) else value
            for field in fields(node)  # type: ignore[arg-type]
            for value in (getattr(node, field.name),)
        }

    return plain(config)
