"""Adapters put beside a model's frozen layers, found again, switched off and merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.dora import MAGNITUDE, DoraConv1D, DoraLinear
from mgpu_pipe.models.adapters.low_rank import A, B, LoraConv1D, LoraLayer, LoraLinear
from mgpu_pipe.models.plans import decoder_blocks

ADAPTER_NAMES = (A, B, MAGNITUDE)
ADAPTER = "mgpu_adapter"
"""The attribute of a model's root module that holds the keys of its adapters."""
ALL_LINEAR = "all-linear"
ROUTERS = ("gate", "router")
"""What linear layers that choose experts are called."""


KINDS: dict[str, dict[type, type[LoraLayer]]] = {
    "lora": {nn.Linear: LoraLinear, Conv1D: LoraConv1D},
    "dora": {nn.Linear: DoraLinear, Conv1D: DoraConv1D},
}
"""What a linear layer becomes, by the adapter's name."""
LINEAR = (nn.Linear, Conv1D)


def add_adapters(model: nn.Module, keys: PeftConfig) -> None:
    """Put an adapter beside every layer that ``keys`` target, and freeze all else but ``keys.train_also``.

    Their initial values give the model's own result: A is drawn as a linear layer's weight is, all else is zero. On
    the meta device they are drawn with the other parameters.

    Raises:
        ConfigError: a pattern that matches nothing, or a rank above a layer's sizes.
    """
    if keys.name == "none":
        return
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, layer in _targets(model, keys.targets):
        _adapt(name, layer, keys)
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in keys.train_also:
        for name in _matching("peft.train_also", pattern, list(named)):
            named[name].requires_grad_(True)
    model.__dict__[ADAPTER] = keys


def adapter_of(model: nn.Module) -> PeftConfig:
    """The keys of ``model``'s adapters."""
    keys: PeftConfig = model.__dict__.get(ADAPTER) or PeftConfig()
    return keys


def is_adapter(name: str) -> bool:
    """Whether that is the name of an adapter's parameter."""
    return name.rpartition(".")[2] in ADAPTER_NAMES


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers that have an adapter, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it is without its adapters, whose products count nothing inside."""
    layers = [layer for _, layer in lora_layers(model)]
    try:
        for layer in layers:
            layer.adapts = False
        yield
    finally:
        for layer in layers:
            del layer.adapts


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Put what every adapter does into the weight beside it, in place; what is left are plain layers."""
    for _, layer in lora_layers(model):
        own = {name: getattr(layer, name) for name in layer.OWN}
        layer.rows().copy_(layer.merge(layer.rows(), layer.lora_scale, own))
        for name in (*layer.OWN, "lora_dropout"):
            delattr(layer, name)
        layer.__class__ = next(plain for plain in LINEAR if isinstance(layer, plain))
    model.__dict__.pop(ADAPTER, None)


def _targets(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    names = {module: name for name, module in model.named_modules()}
    linear = {name: module for module, name in names.items() if type(module) in LINEAR}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            inside = {names[part] for block in decoder_blocks(model) for part in block.modules()}
            matched = [name for name in linear if name in inside and name.rpartition(".")[2] not in ROUTERS]
        else:
            matched = _matching("peft.targets", pattern, list(linear))
        chosen.update({name: linear[name] for name in matched})
    if not chosen:
        raise ConfigError("peft.targets", list(patterns), f"use [{ALL_LINEAR}]", "no linear layer is targeted")
    return list(chosen.items())


def _matching(key: str, pattern: str, names: Sequence[str]) -> list[str]:
    matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
    if not matched:
        close = nearest(pattern, [*names, *{name.rpartition(".")[2] for name in names}])
        fix = f"did you mean {close}?" if close else f"use names like {names[0]}" if names else "leave it out"
        raise ConfigError(key, pattern, fix, "matches nothing in the model")
    return matched


def _adapt(name: str, layer: Any, keys: PeftConfig) -> None:
    rows, columns = layer.weight.shape
    inputs, outputs = (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)
    if keys.r > min(inputs, outputs):
        reason = f"{name} has {inputs} inputs and {outputs} outputs"
        raise ConfigError("peft.r", keys.r, f"use at most {min(inputs, outputs)}", reason)
    layer.__class__ = KINDS[keys.name][type(layer)]
    layer.adapt(keys, inputs, outputs, dtype=layer.weight.dtype, device=layer.weight.device)
