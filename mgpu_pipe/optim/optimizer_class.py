"""Class of the configured optimizer, without imports of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.targets.build_target import resolve_target
from mgpu_pipe.errors import ConfigError


def optimizer_class(target: str, lr: float, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Class of ``optimizer._target_``, and its constructor's arguments without the parameters.

    Raises:
        ConfigError: no subclass of ``torch.optim.Optimizer``, an unknown option, or its ``step`` evaluates the loss.
    """
    cls, arguments = resolve_target({"_target_": target, "lr": lr, **options}, "torch.optim.Optimizer", "optimizer")
    closure = inspect.signature(getattr(cls, "step")).parameters.get("closure")  # noqa: B009
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = f"{cls.__name__} evaluates the loss itself, several times a step"
        raise ConfigError("optimizer._target_", target, "use an optimizer that takes given gradients", reason)
    return cls, arguments
