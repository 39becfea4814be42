"""Parameters that are not trained, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.model_parts import named as named_parts
from mgpu_pipe.models.model_parts import never_used


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze every parameter whose name one of ``patterns`` matches (``*``, ``?``, ``[...]``, or a part); their names.

    Parameters that are never used are frozen too.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    frozen = never_used(model)
    for name in frozen:
        named[name].requires_grad_(False)
    for pattern in named_parts(model, patterns):
        matched = [name for name in named if fnmatchcase(name, pattern)]
        if not matched:
            close = nearest(pattern, list(named))
            fix = f"did you mean {close}?" if close else f"use names like {next(iter(named))}"
            raise ConfigError("model.freeze", pattern, fix, "matches no parameter of the model")
        for name in matched:
            named[name].requires_grad_(False)
        frozen += matched
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError("model.freeze", list(patterns), "leave some parameters out", "nothing is left to train")
    return frozen
