"""Objectives by name: built-in ones, and those that installed packages register."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mgpu_pipe.config.plugins import OBJECTIVE_FILES, OBJECTIVE_GROUP, load
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.protocols import PROTOCOLS


def objective_class(name: str) -> type[Objective]:
    """Class named by ``objective.name``; its ``from_config`` builds it.

    Raises:
        ConfigError: no such name, or the registered object is no complete subclass of ``Objective``, or it defines
            only a part of a protocol.
    """
    if name in OBJECTIVE_FILES:
        file, _, class_name = OBJECTIVE_FILES[name][1].partition(".")
        built_in: type[Objective] = getattr(import_module(f"mgpu_pipe.objectives.{file}"), class_name)
        return built_in
    loaded: type[Objective] = load_subclass("objective.name", name, OBJECTIVE_GROUP, Objective)
    for protocol in PROTOCOLS:
        methods = {method for method, value in vars(protocol).items() if callable(value) and method[0] != "_"}
        missing = sorted(method for method in methods if not hasattr(loaded, method))
        if 0 < len(missing) < len(methods):
            reason = f"{loaded.__qualname__} has only a part of {protocol.__module__}.{protocol.__qualname__}"
            raise ConfigError("objective.name", name, f"define {', '.join(missing)}", reason)
    return loaded


def load_subclass(key: str, name: str, group: str, base: type) -> Any:
    """Class that an entry point names.

    Raises:
        ConfigError: it is no subclass of ``base``, or does not define all abstract methods.
    """
    loaded = load(key, name, group)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        reason = f"the entry point names {getattr(loaded, '__qualname__', loaded)}, which is no such class"
        raise ConfigError(key, name, f"register a subclass of {base.__module__}.{base.__qualname__}", reason)
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(key, name, f"define {', '.join(missing)}", f"{loaded.__qualname__} leaves them abstract")
    return loaded
