"""LoRA: a low-rank product, trained beside a frozen linear layer (Hu et al. 2021, arXiv:2106.09685).

A linear layer becomes a LoRA layer by its class, so its weight keeps its name: plans, recipes and checkpoints see a
layer with two more parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.plans import decoder_blocks

A, B = "lora_A", "lora_B"
"""Parameters of shapes (rank, inputs) and (outputs, rank), also beside a weight that is stored transposed."""
ADAPTER_NAMES = (A, B)
ADAPTER = "mgpu_adapter"
"""The attribute of a model's root module that holds the keys of its adapters."""
ALL_LINEAR = "all-linear"
ROUTERS = ("gate", "router")
"""What linear layers that choose experts are called."""


class LoraLayer(nn.Module):
    """The parts that both kinds of linear layers share."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: nn.Module | None

    def low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to the layer's result, of shape (..., outputs)."""
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        return F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.lora_scale


class LoraLinear(LoraLayer, nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x) + self.low_rank(x)


class LoraConv1D(LoraLayer, Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Conv1D.forward(self, x)
        return result + self.low_rank(x)


KINDS: dict[type, type[LoraLayer]] = {nn.Linear: LoraLinear, Conv1D: LoraConv1D}


def add_adapters(model: nn.Module, keys: PeftConfig) -> None:
    """Put an adapter beside every layer that ``keys`` target, and freeze all else but ``keys.train_also``.

    Their initial values give the model's own result: A is drawn as a linear layer's weight is, B is zero. On the meta
    device they are drawn with the other parameters.

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
    scales = [layer.lora_scale for layer in layers]
    try:
        for layer in layers:
            layer.lora_scale = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.lora_scale = scale


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every low-rank product to the weight beside it, in place; what is left are plain layers."""
    for _, layer in lora_layers(model):
        product = (layer.lora_B @ layer.lora_A) * layer.lora_scale
        layer.weight += product.t() if isinstance(layer, Conv1D) else product
        del layer.lora_A, layer.lora_B, layer.lora_dropout
        layer.__class__ = next(plain for plain, kind in KINDS.items() if type(layer) is kind)
    model.__dict__.pop(ADAPTER, None)


def _targets(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    names = {module: name for name, module in model.named_modules()}
    linear = {name: module for module, name in names.items() if type(module) in KINDS}
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
    like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    layer.lora_A = nn.Parameter(torch.empty(keys.r, inputs, **like))
    nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.lora_B = nn.Parameter(torch.zeros(outputs, keys.r, **like))
    layer.lora_scale = keys.scale
    layer.lora_dropout = nn.Dropout(keys.dropout) if keys.dropout else None
    layer.__class__ = KINDS[type(layer)]
