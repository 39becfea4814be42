"""Writes a run's configuration to a file, reads it back and hashes it."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.hydra.interpolation import escaped, plain_values, unescaped
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.plugins import with_first_classes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.untrusted_run import check_environment_use
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes, replace_file

HEADER = "# The run's configuration, composed once; every worker reads it from here.\n"
HASH_LENGTH = 16


def freeze(config: RunConfig, path: Path, *, flush: bool = True) -> None:
    """Write ``config`` as YAML, atomically, on disk with ``flush``; texts of the environment as ``${oc.env:...}``."""
    sections = escaped(to_plain(config, leaf=lambda value: value))
    text = "".join(_written(name, repr(value), value) for name, value in sections.items())
    replace_file(path, HEADER + text, flush=flush)


def _written(name: str, key: str, value: object) -> str:
    """YAML of a section, cached because the points of a sweep share most sections."""
    text = _sections.get((name, key))
    if text is None:
        text = _sections[name, key] = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True)
    return text


_sections: dict[tuple[str, str], str] = {}


def load(path: Path) -> RunConfig:
    """Read a frozen configuration; interpolations are resolved from this process's environment.

    Raises:
        BadInputError: the file is missing, no plain file or not YAML.
        ConfigErrors: the values do not fit the schema, or an environment variable is not set.
        ConfigError: the file is another user's and reads the environment.
    """
    values, _ = _read(path)
    check_environment_use(path, values)
    return _resolved(values)


def _resolved(values: dict[str, Any]) -> RunConfig:
    resolved, errors = plain_values(OmegaConf.create(values))
    config, mistyped = convert(RunConfig, resolved)
    if errors or mistyped:
        raise ConfigErrors([*errors, *mistyped])
    return config


def load_untrusted(path: Path) -> tuple[RunConfig, bool]:
    """Read a configuration that another user may have written.

    Returns:
        The configuration, and whether this user's launches wrote it (:func:`remember`). If so, it equals the result
        of :func:`load`. Otherwise interpolations stay texts, and the environment is not read.

    Raises:
        BadInputError, ConfigErrors: see :func:`load`.
    """
    values, digest = _read(path)
    if _known(digest).exists():
        return _resolved(values), True
    config, mistyped = convert(RunConfig, _literal(values))
    if mistyped:
        raise ConfigErrors(mistyped)
    return config, False


def remember(path: Path) -> None:
    """Record in the user's cache that this configuration is theirs; without a cache, nothing is recorded."""
    remember_bytes(path.read_bytes())


def remember_bytes(content: bytes) -> None:
    """Record in the user's cache that their launches wrote ``content``."""
    known = _known(hashlib.sha256(content).hexdigest())
    with suppress(OSError, ConfigError):
        private_folder(known.parents[1])
        known.parent.mkdir(exist_ok=True)
        known.touch()


def is_remembered(content: bytes) -> bool:
    """Whether this user's launches wrote ``content`` (:func:`remember_bytes`)."""
    return _known(hashlib.sha256(content).hexdigest()).exists()


def _known(digest: str) -> Path:
    return cache_folder(None) / "configurations" / digest


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Raw values of a YAML file, and the SHA-256 of its bytes."""
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
        values = parse_yaml(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: not a readable configuration ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path}: not a configuration, because it is not a mapping; give a run's config.yaml")
    return values, hashlib.sha256(data).hexdigest()


def _literal(value: Any) -> Any:
    """Values as :func:`load` returns them, but with interpolations left as texts."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return unescaped(value) if isinstance(value, str) else value


def config_hash(config: RunConfig) -> str:
    """Start of the SHA-256 of a configuration's sorted JSON, with values as written, never those of the environment."""
    text = json.dumps(with_first_classes(to_plain(config)), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
