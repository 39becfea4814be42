"""From an OmegaConf configuration to plain values, with values of the environment kept apart.

``${oc.env:NAME}`` is how a secret or a machine's own path reaches a run. Its value is needed in memory, and must
never reach a file, a log or a report. It is therefore carried as an :class:`EnvironmentText`, a string that still
knows the interpolation it came from; whatever is written shows that interpolation.
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

from mgpu_pipe.compat.hydra_private import raw_value
from mgpu_pipe.errors import ConfigError, hide

MISSING = "???"
HYDRA_NODE = "hydra"


class EnvironmentText(str):
    """A string from the environment; ``interpolation`` is what stands for it in everything that is written."""

    interpolation: str

    def __new__(cls, value: str, interpolation: str) -> EnvironmentText:
        made = super().__new__(cls, value)
        made.interpolation = interpolation
        return made

    def __repr__(self) -> str:
        return repr(self.interpolation)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return EnvironmentText, (str.__str__(self), self.interpolation)


def plain_values(config: DictConfig) -> tuple[dict[str, Any], list[ConfigError]]:
    """Resolve every interpolation.

    Returns:
        The plain nested values without Hydra's own node, strings that depend on ``oc.env`` as
        :class:`EnvironmentText`, missing values (``???``) as they are; and an error for each interpolation that
        cannot be resolved.
    """
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
    """Find what depends on the environment by resolving once more with another environment."""
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


def written(value: Any) -> Any:
    """``value`` as it may be written: the interpolation in place of every text of the environment."""
    if isinstance(value, EnvironmentText):
        return value.interpolation
    if isinstance(value, Mapping):
        return {key: written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    return value


def escaped(value: Any) -> Any:
    """Like :func:`written`, with literal ``${`` escaped, so that reading it back gives the same text."""
    if isinstance(value, EnvironmentText):
        return value.interpolation
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: "\\" * (2 * len(match[1]) + 1) + "${", value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return value


def unescaped(text: str) -> str:
    """A text as :func:`escaped` was given it; an interpolation in it stays as it is written."""
    return re.sub(r"(\\+)\$\{", lambda match: "\\" * (len(match[1]) // 2) + "${", text)
