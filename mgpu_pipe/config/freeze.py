"""Freezes a configuration to a file, reads it back, and gives it an identity."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.interpolation import escaped, plain_values, unescaped
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes
from mgpu_pipe.config.replace_file import replace_file
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

HEADER = "# The run's configuration, composed once; every worker reads it from here.\n"
HASH_LENGTH = 16


def freeze(config: RunConfig, path: Path, *, flush: bool = True) -> None:
    """Write ``config`` as YAML, whole or not at all; ``flush``: it is on the disk on return.

    Texts of the environment (``${oc.env:...}``) are written as the interpolation, never as their value.
    """
    sections = escaped(_with_interpolations(config))
    text = "".join(_written(name, repr(value), value) for name, value in sections.items())
    replace_file(path, HEADER + text, flush=flush)


def _written(name: str, key: str, value: object) -> str:
    """A section as YAML; the points of a sweep have most in common."""
    text = _sections.get((name, key))
    if text is None:
        text = _sections[name, key] = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True)
    return text


_sections: dict[tuple[str, str], str] = {}


def load(path: Path) -> RunConfig:
    """Read a frozen configuration; interpolations are resolved from this process's environment.

    Raises:
        BadInputError: the file is missing, no plain file or not YAML.
        ConfigErrors: it does not fit the schema, or names an environment variable that is not set.
    """
    values, _ = _read(path)
    resolved, errors = plain_values(OmegaConf.create(values))
    config, mistyped = convert(RunConfig, resolved)
    if errors or mistyped:
        raise ConfigErrors([*errors, *mistyped])
    return config


def load_untrusted(path: Path) -> tuple[RunConfig, bool]:
    """Read a configuration that somebody else may have written.

    Returns:
        The configuration, and whether this user's own launches wrote it (:func:`remember`). Then it is as
        :func:`load` gives it; else it is data: interpolations stay texts, and nothing of the environment is looked up.

    Raises:
        BadInputError, ConfigErrors: as :func:`load`.
    """
    values, digest = _read(path)
    if _known(digest).exists():
        return load(path), True
    config, mistyped = convert(RunConfig, _literal(values))
    if mistyped:
        raise ConfigErrors(mistyped)
    return config, False


def remember(path: Path) -> None:
    """Keep in the user's cache that this configuration is one of their own; without a cache, it is not known later."""
    known = _known(hashlib.sha256(path.read_bytes()).hexdigest())
    with suppress(OSError, ConfigError):
        private_folder(known.parents[1])
        known.parent.mkdir(exist_ok=True)
        known.touch()


def _known(digest: str) -> Path:
    return cache_folder(None) / "configurations" / digest


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The values of a YAML file as they are written, and the SHA-256 of its bytes."""
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
        values = parse_yaml(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: not a readable configuration ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path}: not a configuration, for it is no mapping; give a run's config.yaml")
    return values, hashlib.sha256(data).hexdigest()


def _literal(value: Any) -> Any:
    """Values as :func:`load` would give them, but with interpolations as the texts they are."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return unescaped(value) if isinstance(value, str) else value


def config_hash(config: RunConfig) -> str:
    """Hexadecimal identity of a configuration: the start of the SHA-256 of its sorted JSON.

    It depends on what is written, so not on the values of the environment.
    """
    text = json.dumps(to_plain(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def _with_interpolations(config: RunConfig) -> dict[str, object]:
    """Nested plain values that still hold texts of the environment as such, for :func:`escaped`."""
    return to_plain(config, leaf=lambda value: value)
