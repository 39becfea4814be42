"""Parameter groups of the optimizer: learning rate, weight decay and start, by parameter names.

Names are those of the whole model; a rank's parameters, cut or not, keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from mgpu_pipe.config.group_keys import OptimizerConfig, ParameterGroup
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.model_parts import named_parts
from mgpu_pipe.models.shard_units import decoder_blocks


@dataclass(frozen=True)
class Treatment:
    """Training of a parameter. Its learning rate is ``lr``, or the optimizer's times ``lr_factor``."""

    lr: float | None
    lr_factor: float
    weight_decay: float
    frozen_until: int

    def options(self, lr: float) -> dict[str, Any]:
        """Options of the optimizer's group that differ from its defaults, with the learning rate ``lr``."""
        group_lr = lr * self.lr_factor if self.lr is None else self.lr
        start = {"frozen_until": self.frozen_until} if self.frozen_until else {}
        return {**({} if group_lr == lr else {"lr": group_lr}), **start}


def treatments(model: torch.nn.Module, config: OptimizerConfig) -> dict[str, Treatment]:
    """Treatments of all trained parameters of the whole ``model``, by every name.

    A tied parameter has several names, of which the first decides; a pipeline may have copies under each.

    Raises:
        ConfigError: a pattern matches no parameter, or a group has no trained one.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    patterns = {name: named_parts(model, group.parameters) for name, group in config.groups.items()}
    for name, several in patterns.items():
        _check_patterns(name, several, list(named))
    factors = _layer_factors(model, config.layer_decay)
    chosen_treatments, used = {}, set()
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        chosen = _group_of(parameter_name, patterns)
        group = ParameterGroup() if chosen is None else config.groups[chosen]
        used.add(chosen)
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        factor = factors.get(parameter_name, 1.0) if group.lr is None else 1.0
        chosen_treatments[parameter_name] = Treatment(group.lr, factor, decay, group.frozen_until)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen_treatments = {
        name: chosen_treatments[first[id(parameter)]]
        for name, parameter in named.items()
        if first[id(parameter)] in chosen_treatments
    }
    for name, group in config.groups.items():
        if name not in used:
            reason = "it is left without a trained parameter: each is frozen, or belongs to a group above"
            raise ConfigError(f"optimizer.groups.{name}.parameters", group.parameters, "change its patterns", reason)
    return chosen_treatments


def _check_patterns(name: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    key = f"optimizer.groups.{name}.parameters"
    if not patterns:
        raise ConfigError(key, [], f"name some, such as [{names[0]}]", "the group names no parameter")
    for pattern in patterns:
        if not any(fnmatchcase(parameter, pattern) for parameter in names):
            close = nearest(pattern, names)
            fix = f"did you mean {close}?" if close else f"use names like {names[0]}"
            raise ConfigError(key, pattern, fix, "matches no parameter of the model")


def _group_of(parameter: str, groups: Mapping[str, Sequence[str]]) -> str | None:
    """First group with a pattern that matches the parameter, or None."""
    for name, patterns in groups.items():
        if any(fnmatchcase(parameter, pattern) for pattern in patterns):
            return name
    return None


def _layer_factors(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Factors of layer-wise decay on the learning rate by parameter, without factors of 1.

    A tower of n blocks has ``decay**1`` in its last block and ``decay**n`` in its first. Modules before its blocks
    (embeddings, a vision model's patches) have ``decay**(n + 1)``. Modules after them (norm, head) have none.
    """
    if decay == 1.0:
        return {}
    blocks = {id(block) for block in decoder_blocks(model)}
    powers: dict[int, int] = {}

    def visit(module: torch.nn.Module) -> int:
        """Number of blocks of the tallest tower in ``module``."""
        tower = [child for child in module.children() if id(child) in blocks]
        for power, block in enumerate(reversed(tower), 1):
            powers.update((id(parameter), power) for parameter in block.parameters())
        tallest, before = len(tower), list[torch.nn.Module]()
        for child in () if tower else module.children():
            height = visit(child)
            if height:
                lowest = ((id(parameter), height + 1) for below in before for parameter in below.parameters())
                powers.update(lowest)
                before.clear()
            else:
                before.append(child)
            tallest = max(tallest, height)
        return tallest

    visit(model)
    named = model.named_parameters()
    return {name: decay ** powers[id(parameter)] for name, parameter in named if id(parameter) in powers}
