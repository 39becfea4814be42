"""Objectives by name: this project's own, and those that installed packages register."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mgpu_pipe.config.plugins import OBJECTIVE_GROUP, OBJECTIVES, load
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.base import Objective


def objective_class(name: str) -> type[Objective]:
    """The class that ``objective.name`` names; it is built by its ``from_config``.

    Raises:
        ConfigError: no such name, or what is registered is not a whole subclass of ``Objective``.
    """
    if name in OBJECTIVES:
        found: type[Objective] = import_module(f"mgpu_pipe.objectives.{name}").OBJECTIVE
        return found
    loaded: type[Objective] = whole_subclass("objective.name", name, OBJECTIVE_GROUP, Objective)
    return loaded


def whole_subclass(key: str, name: str, group: str, base: type) -> Any:
    """The class that an entry point names.

    Raises:
        ConfigError: it is no subclass of ``base``, or leaves something of it undefined.
    """
    found = load(key, name, group)
    if not (isinstance(found, type) and issubclass(found, base)):
        reason = f"what the entry point names, {getattr(found, '__qualname__', found)}, is none"
        raise ConfigError(key, name, f"register a subclass of {base.__module__}.{base.__qualname__}", reason)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(key, name, f"define {', '.join(missing)}", f"{found.__qualname__} does not say how")
    return found
