"""Objectives and strategies by name: this project's own, and those that installed packages register."""

from __future__ import annotations

from typing import Any

from mgpu_pipe.config.plugins import OBJECTIVE_GROUP, STRATEGY_GROUP, load
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.strategies.base import EngineStrategy
from mgpu_pipe.strategies.deepspeed import DeepSpeedStrategy
from mgpu_pipe.strategies.mesh import MeshStrategy


def objective_class(name: str) -> type[Objective]:
    """The class that ``objective.name`` names; it is built by its ``from_config``.

    Raises:
        ConfigError: no such name, or what is registered is not a whole subclass of ``Objective``.
    """
    return _named("objective.name", name, {"causal_lm": CausalLMObjective}, OBJECTIVE_GROUP, Objective)


def strategy_class(engine: str) -> type[EngineStrategy]:
    """The class that ``strategy.engine`` names; it is built by its ``from_config``.

    Raises:
        ConfigError: no such name, or what is registered is not a whole subclass of ``EngineStrategy``.
    """
    own = {"mesh": MeshStrategy, "deepspeed": DeepSpeedStrategy}
    return _named("strategy.engine", engine, own, STRATEGY_GROUP, EngineStrategy)


def _named(key: str, name: str, own: dict[str, Any], group: str, base: type) -> Any:
    if name in own:
        return own[name]
    found = load(key, name, group)
    if not (isinstance(found, type) and issubclass(found, base)):
        reason = f"what the entry point names, {getattr(found, '__qualname__', found)}, is none"
        raise ConfigError(key, name, f"register a subclass of {base.__module__}.{base.__qualname__}", reason)
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(key, name, f"define {', '.join(missing)}", f"{found.__qualname__} does not say how")
    return found
