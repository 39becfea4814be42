"""Adapters put beside a model's frozen layers, found again, switched off and merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.peft import ALL_LINEAR, PeftConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.dora import MAGNITUDE, DoraConv1D, DoraLinear
from mgpu_pipe.models.adapters.experts import adapted_class, packs_experts
from mgpu_pipe.models.adapters.low_rank import A, Adapted, B, LoraConv1D, LoraLayer, LoraLinear
from mgpu_pipe.models.adapters.qlora import QUANTISED, quantise_module
from mgpu_pipe.models.model_parts import named as named_parts
from mgpu_pipe.models.model_parts import never_used, part_patterns
from mgpu_pipe.models.plans import decoder_blocks

ADAPTER_NAMES = (A, B, MAGNITUDE)
ADAPTER = "mgpu_adapter"
"""The attribute of a model's root module that holds the keys of its adapters."""
EXPERTS = "experts"
"""The target that is the packed weights of experts."""
ROUTERS = ("gate", "router")
"""What linear layers that choose experts are called."""
KINDS: dict[str, dict[type, type[LoraLayer]]] = {
    "lora": {nn.Linear: LoraLinear, Conv1D: LoraConv1D},
    "dora": {nn.Linear: DoraLinear, Conv1D: DoraConv1D},
    "qlora": {nn.Linear: LoraLinear, Conv1D: LoraConv1D},
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
    for name, layer in _targets(model, keys):
        _adapt(name, layer, keys)
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in named_parts(model, keys.train_also):
        for name in _matching("peft.train_also", pattern, list(named)):
            named[name].requires_grad_(True)
    if keys.name == "qlora":
        experts = {name: module for name, module in model.named_modules() if packs_experts(module)}
        for name, module in {**_block_linears(model), **experts}.items():
            quantise_module(name, module)
    model.__dict__[ADAPTER] = keys


def adapter_of(model: nn.Module) -> PeftConfig:
    """The keys of ``model``'s adapters."""
    keys: PeftConfig = model.__dict__.get(ADAPTER) or PeftConfig()
    return keys


def is_adapter(name: str) -> bool:
    """Whether that is the name of an adapter's parameter."""
    return name.rpartition(".")[2].endswith(ADAPTER_NAMES)


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that have adapters, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Adapted)]


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
        adapted = layer.adapted()
        for weight, names in adapted.items():
            rows = layer.rows(weight)
            rows.copy_(layer.merge(rows, layer.lora_scale, {one: getattr(layer, own) for one, own in names.items()}))
        for name in (*(own for names in adapted.values() for own in names.values()), "lora_dropout"):
            delattr(layer, name)
        layer.__class__ = type(layer).__bases__[-1]
    model.__dict__.pop(ADAPTER, None)


def _targets(model: nn.Module, keys: PeftConfig) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    in_blocks = _block_linears(model)
    linear = [name for name, module in modules.items() if type(module) in LINEAR]
    chosen: dict[str, nn.Module] = {}
    parts = part_patterns(model)
    for pattern in keys.targets:
        if pattern == ALL_LINEAR:
            matched = list(in_blocks)
        elif pattern == EXPERTS:
            matched = [name for name, module in modules.items() if packs_experts(module)]
            if not matched:
                raise ConfigError("peft.targets", EXPERTS, "leave it out", "the model has no packed weights of experts")
            if keys.name == "dora":
                raise ConfigError("peft.targets", EXPERTS, "use peft=lora", "DoRA is for single layers")
        elif pattern in parts:
            inside = [name for name in linear if any(fnmatchcase(name, one) for one in parts[pattern])]
            matched = [name for name in inside if name in in_blocks] or inside
        else:
            matched = _matching("peft.targets", pattern, linear)
        chosen.update({name: modules[name] for name in matched})
    if not chosen:
        raise ConfigError("peft.targets", list(keys.targets), f"use [{ALL_LINEAR}]", "no linear layer is targeted")
    return list(chosen.items())


def _block_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of the blocks, adapted or not, but for routers and what is never used."""
    idle = {id(model.get_submodule(name.rpartition(".")[0])) for name in never_used(model)}
    inside = {id(part) for block in decoder_blocks(model) for part in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in QUANTISED
        and id(module) in inside
        and name.rpartition(".")[2] not in ROUTERS
        and id(module) not in idle
    }


def _matching(key: str, pattern: str, names: Sequence[str]) -> list[str]:
    matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
    if not matched:
        close = nearest(pattern, [*names, *{name.rpartition(".")[2] for name in names}])
        fix = f"did you mean {close}?" if close else f"use names like {names[0]}" if names else "leave it out"
        raise ConfigError(key, pattern, fix, "matches nothing in the model")
    return matched


def _adapt(name: str, module: Any, keys: PeftConfig) -> None:
    plain: Any = type(module)
    module.__class__ = KINDS[keys.name].get(plain) or adapted_class(plain)
    for weight in module.adapted():
        outputs, inputs = module.rows(weight).shape[-2:]
        if keys.r > min(inputs, outputs):
            reason = f"{name} has {inputs} inputs and {outputs} outputs"
            raise ConfigError("peft.r", keys.r, f"use at most {min(inputs, outputs)}", reason)
    module.lora_scale = keys.scale
    module.lora_dropout = nn.Dropout(keys.dropout) if keys.dropout else None
    module.adapt(keys)
