"""Restrictions on another user's configuration: its data settings are followed, its paths are not.

A configuration is foreign unless this user's launches wrote it (:func:`mgpu_pipe.config.freeze.load_untrusted`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.config.sections import own_keys
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

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
