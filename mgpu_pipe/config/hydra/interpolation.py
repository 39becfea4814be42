"""Converts an OmegaConf configuration to plain values, marking values of the environment.

``${oc.env:NAME}`` brings a secret or a machine's path into a run. Its value must never reach a file, a log or a
report. It is therefore an :class:`EnvironmentText`, a string that knows its interpolation; writers write the latter.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from mgpu_pipe.errors import ConfigError, hide
from mgpu_pipe.system.compat.hydra_private import raw_value
from mgpu_pipe.system.hardware import cpu_is_fast_at_bf16, usable_gpus


def devices(on_cpu: int, *, _root_: DictConfig) -> int:
    """Number of usable GPUs, or ``on_cpu`` without GPUs or if the accelerator is the CPU."""
    if OmegaConf.select(_root_, "strategy.name") == "single":
        return 1
    return _gpus(_root_) or int(on_cpu)


def native_precision(*, _root_: DictConfig) -> str:
    """``bf16`` if training runs on a CPU with bf16 units, else ``auto``."""
    return "bf16" if not _gpus(_root_) and cpu_is_fast_at_bf16() else "auto"


def _gpus(root: DictConfig) -> int:
    """Number of GPUs that training would use."""
    return 0 if OmegaConf.select(root, "trainer.accelerator") == "cpu" else usable_gpus()


def replicas(*, _root_: DictConfig) -> int | str:
    """``auto`` if ``strategy.dp_shard`` is set, else the number of nodes."""
    if OmegaConf.select(_root_, "strategy.dp_shard") != "auto":
        return "auto"
    return int(OmegaConf.select(_root_, "trainer.num_nodes") or 1)


def place(path: str) -> str:
    """``path``, checked here because Hydra creates folders before a configuration is checked."""
    if not str(path).strip():
        raise ConfigError("run.root", path, "give a folder, or leave it out")
    return path


def register() -> None:
    """Register the resolvers with OmegaConf; idempotent."""
    OmegaConf.register_new_resolver("mgpu.devices", devices, replace=True)
    OmegaConf.register_new_resolver("mgpu.native_precision", native_precision, replace=True)
    OmegaConf.register_new_resolver("mgpu.replicas", replicas, replace=True)
    OmegaConf.register_new_resolver("mgpu.place", place, replace=True)


MISSING = "???"
HYDRA_NODE = "hydra"


class EnvironmentText(str):
    """A string from the environment; writers write its ``interpolation`` instead."""

    interpolation: str

    def __new__(cls, value: str, interpolation: str) -> EnvironmentText:
        text = super().__new__(cls, value)
        text.interpolation = interpolation
        return text

    def __repr__(self) -> str:
        return repr(self.interpolation)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return EnvironmentText, (str.__str__(self), self.interpolation)


def plain_values(config: DictConfig) -> tuple[dict[str, Any], list[ConfigError]]:
    """Nested values without Hydra's node, ``oc.env`` as :class:`EnvironmentText`, missing ones ``???``; and errors."""
    errors: list[ConfigError] = []
    values = _plain(config, "", errors)
    if "oc.env" in str(OmegaConf.to_container(config, resolve=False)):
        _mark_environment(values, config)
    return values, errors


def _plain(node: DictConfig | ListConfig, path: str, errors: list[ConfigError]) -> Any:
    keys: Iterator[Any] = iter(node.keys()) if isinstance(node, DictConfig) else iter(range(len(node)))
    plain = {}
    for key in keys:
        if not path and key == HYDRA_NODE:
            continue
        where = f"{path}.{key}" if path else str(key)
        if OmegaConf.is_missing(node, key):
            plain[key] = MISSING
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            raw = raw_value(node, key)
            reason = str(error).strip().splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ")
            errors.append(ConfigError(where, raw, "correct the interpolation or set what it names", reason.strip('"')))
            continue
        plain[key] = _plain(value, where, errors) if isinstance(value, DictConfig | ListConfig) else value
    return plain if isinstance(node, DictConfig) else list(plain.values())


def _mark_environment(values: dict[str, Any], config: DictConfig) -> None:
    """Mark strings that depend on the environment, found by resolving again with another environment."""
    sentinel = uuid.uuid4().hex

    def other_environment(name: str, *_: object) -> str:
        if name in os.environ:
            hide(os.environ[name], f"${{oc.env:{name}}}")
        return sentinel

    OmegaConf.register_new_resolver("oc.env", other_environment, replace=True)
    try:
        other = _plain(config, "", [])
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    raw = OmegaConf.to_container(config, resolve=False)
    _mark(values, other, raw, sentinel)


def _mark(values: Any, other: Any, raw: Any, sentinel: str) -> None:
    keys = list(values) if isinstance(values, dict) else range(len(values))
    for key in keys:
        value = values[key]
        try:
            replaced, text = other[key], raw[key]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(value, dict | list):
            _mark(value, replaced, text, sentinel)
        elif isinstance(value, str) and isinstance(replaced, str) and sentinel in replaced and isinstance(text, str):
            values[key] = EnvironmentText(value, text)


def hide_environment(value: Any) -> Any:
    """``value`` safe to write, with the interpolation instead of every text of the environment."""
    if isinstance(value, EnvironmentText):
        return value.interpolation
    if isinstance(value, Mapping):
        return {key: hide_environment(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_environment(item) for item in value]
    return value


def escape(value: Any) -> Any:
    """Like :func:`hide_environment`, with literal ``${`` escaped, so that reading restores the text."""
    if isinstance(value, EnvironmentText):
        return value.interpolation
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: "\\" * (2 * len(match[1]) + 1) + "${", value)
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    return value


def unescape(text: str) -> str:
    """Inverse of :func:`escape` for a text; interpolations in it stay as written."""
    return re.sub(r"(\\+)\$\{", lambda match: "\\" * (len(match[1]) // 2) + "${", text)
