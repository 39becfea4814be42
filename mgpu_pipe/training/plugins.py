"""Strategies by name: this project's own, and those that installed packages register."""

from __future__ import annotations

from mgpu_pipe.config.plugins import STRATEGY_GROUP
from mgpu_pipe.objectives.registry import objective_class, whole_subclass
from mgpu_pipe.strategies.base import EngineStrategy

__all__ = ["objective_class", "strategy_class"]


def strategy_class(engine: str) -> type[EngineStrategy]:
    """The class that ``strategy.engine`` names; it is built by its ``from_config``.

    Raises:
        ConfigError: no such name, or what is registered is not a whole subclass of ``EngineStrategy``.
    """
    if engine == "mesh":
        from mgpu_pipe.strategies.mesh import MeshStrategy

        return MeshStrategy
    if engine == "deepspeed":
        from mgpu_pipe.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy
    registered: type[EngineStrategy] = whole_subclass("strategy.engine", engine, STRATEGY_GROUP, EngineStrategy)
    return registered
