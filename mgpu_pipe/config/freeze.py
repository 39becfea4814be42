"""Writes a run's configuration to a file, reads it back and hashes it; restricts another user's.

A configuration is foreign unless this user's launches wrote it (:func:`load_untrusted`). Its data settings are
followed, its paths and the environment are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.hydra.interpolation import escape, plain_values, unescape
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.plugins import with_first_classes
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.config.sections import own_keys
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_yaml, read_bytes, replace_file

HEADER = "# The run's configuration, composed once; every worker reads it from here.\n"
HASH_LENGTH = 16


def freeze(config: RunConfig, path: Path, *, flush: bool = True) -> None:
    """Write ``config`` as YAML, atomically, on disk with ``flush``; texts of the environment as ``${oc.env:...}``."""
    sections = escape(to_plain(config, leaf=lambda value: value))
    text = "".join(_section_yaml(name, repr(value), value) for name, value in sections.items())
    replace_file(path, HEADER + text, flush=flush)


def _section_yaml(name: str, key: str, value: object) -> str:
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
    return _resolve(values)


def _resolve(values: dict[str, Any]) -> RunConfig:
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
    if _memory_file(digest).exists():
        return _resolve(values), True
    config, mistyped = convert(RunConfig, _literal(values))
    if mistyped:
        raise ConfigErrors(mistyped)
    return config, False


def remember(path: Path) -> None:
    """Record in the user's cache that this configuration is theirs; without a cache, nothing is recorded."""
    remember_bytes(path.read_bytes())


def remember_bytes(content: bytes) -> None:
    """Record in the user's cache that their launches wrote ``content``."""
    known = _memory_file(hashlib.sha256(content).hexdigest())
    with suppress(OSError, ConfigError):
        private_folder(known.parents[1])
        known.parent.mkdir(exist_ok=True)
        known.touch()


def is_remembered(content: bytes) -> bool:
    """Whether this user's launches wrote ``content`` (:func:`remember_bytes`)."""
    return _memory_file(hashlib.sha256(content).hexdigest()).exists()


def _memory_file(digest: str) -> Path:
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
    return unescape(value) if isinstance(value, str) else value


def config_hash(config: RunConfig) -> str:
    """Start of the SHA-256 of a configuration's sorted JSON, with values as written, never those of the environment."""
    text = json.dumps(with_first_classes(to_plain(config)), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


NOT_FOLLOWED = (
    "the cache ($MGPU_PIPE_CACHE) knows no launch of yours that made this configuration, so the files that it names "
    "are not read"
)
MAX_SIZES = {"seq_len": 1 << 20, "global_batch_size": 1 << 16}
MAX_SYNTHETIC = 1 << 20
"""Limit of documents, and of tokens per document."""
MAX_DIGITS = 9
MAX_RECORDINGS = 1 << 14


def untrusted_data(data: DataConfig, typed: Set[str]) -> DataConfig:
    """``data`` without paths out of the run's folder, except those on the command line.

    Args:
        typed: keys on the command line, such as ``data.paths``; ``data`` itself is another source.

    Raises:
        ConfigErrors: needed files are not on the command line, or a size exceeds every evaluation.
    """
    source = find_source(data.source)
    errors: list[BadInputError] = []
    changes: dict[str, Any] = {}
    for name, default in (
        ("cache_dir", None),
        ("chat_template", None),
        ("tokenizer", "auto"),
        ("tokenize_workers", "auto"),
        ("micro_batch_size", "auto"),
    ):
        if f"data.{name}" not in typed:
            changes[name] = default
    for name in ("paths", "validation_paths"):
        value, is_typed = getattr(data, name), f"data.{name}" in typed or "data" in typed
        needed = bool(value) or (name == "paths" and (source is None or source.reads_files))
        if needed and not is_typed:
            fix = f"give data.{name}=[...] on the command line"
            errors.append(ConfigError(f"data.{name}", f"[{','.join(value)}]", fix, NOT_FOLLOWED))
    usual = type(data)()
    may_name_files = source is None or data.parts()
    for name in own_keys(type(data)) if may_name_files else ():
        if (value := getattr(data, name)) != getattr(usual, name) and f"data.{name}" not in typed:
            errors.append(ConfigError(f"data.{name}", value, f"give data.{name} on the command line", NOT_FOLLOWED))
    for name, most in MAX_SIZES.items():
        if f"data.{name}" not in typed and getattr(data, name) > most:
            fix = f"give at most {most:,} on the command line"
            errors.append(ConfigError(f"data.{name}", getattr(data, name), fix))
    for name, size, most in (
        ("synthetic.num_documents", data.synthetic.num_documents, MAX_SYNTHETIC),
        ("synthetic.mean_length", data.synthetic.mean_length, MAX_SYNTHETIC),
        ("numbers.count", data.numbers.count, MAX_SYNTHETIC),
        ("numbers.digits", data.numbers.digits, MAX_DIGITS),
        ("target_len", data.target_tokens(), MAX_SIZES["seq_len"]),
        ("recordings", getattr(data, "recordings", 0), MAX_RECORDINGS),
    ):
        is_read = source is None or name.partition(".")[0] in (*source.reads, *own_keys(type(data)))
        if is_read and "data" not in typed and size > most:
            errors.append(ConfigError(f"data.{name}", size, f"give at most {most:,} on the command line"))
    if errors:
        raise ConfigErrors(errors)
    return replace(data, **changes)


ROOT = 0
HARMLESS = ("mgpu.devices", "mgpu.native_precision", "mgpu.replicas", "mgpu.place", "oc.select", "now")
"""Resolvers that neither read the environment nor build an interpolation."""
RESOLVER = re.compile(r"\$\{\s*([^{}:,'\"]*?)\s*(?=[:$])")
"""Name of a resolver, or its part before an interpolation."""


def check_environment_use(file: Path, values: object) -> None:
    """Refuse resolvers that may read the environment in another user's file; ConfigError names the first key."""
    if _is_trusted(file):
        return
    for key, text in _texts(values, ""):
        if any(name not in HARMLESS for name in RESOLVER.findall(text)):
            fix = f"give {key} on the command line, or use a copy of {file}"
            raise ConfigError(key, text, fix, "another user's file cannot read your environment")


def _is_trusted(file: Path) -> bool:
    trusted = {ROOT, os.geteuid()}
    try:
        trusted.add(os.stat(".").st_uid)
        return os.stat(file).st_uid in trusted
    except OSError:  # the file is gone
        return False


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text below ``value`` with its key, and the names of keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            below = f"{key}.{name}" if key else str(name)
            yield below, str(name)
            yield from _texts(item, below)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}[{index}]")
