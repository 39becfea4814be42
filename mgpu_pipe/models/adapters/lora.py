"""Adapters of a model's frozen layers: add, find, disable and merge them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.config.group_keys import ALL_LINEAR, PeftConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.low_rank import (
    MAGNITUDE,
    WEIGHTS,
    A,
    Adapted,
    B,
    DoraConv1D,
    DoraLinear,
    LoraConv1D,
    LoraLayer,
    LoraLinear,
    adapted_class,
    packs_experts,
)
from mgpu_pipe.models.adapters.qlora import QUANTISED, quantise_module
from mgpu_pipe.models.model_parts import named_parts, part_patterns, unused_parameters
from mgpu_pipe.models.shard_units import decoder_blocks

ADAPTER_NAMES = (A, B, MAGNITUDE)
ADAPTER = "mgpu_adapter"
"""Attribute of a root module with the keys of its adapters."""
EXPERTS = "experts"
"""Target of packed experts' weights."""
ROUTERS = ("gate", "router")
"""Names of linear layers that choose experts."""
KINDS: dict[str, dict[type, type[LoraLayer]]] = {
    "lora": {nn.Linear: LoraLinear, Conv1D: LoraConv1D},
    "dora": {nn.Linear: DoraLinear, Conv1D: DoraConv1D},
    "qlora": {nn.Linear: LoraLinear, Conv1D: LoraConv1D},
}
"""Class of an adapted linear layer, by the adapter's name."""
LINEAR = (nn.Linear, Conv1D)
OTHER_LINEAR = "FalconLinear"
"""transformers' subclass of a linear layer that computes the same."""


def add_adapters(model: nn.Module, keys: PeftConfig) -> None:
    """Adds an adapter to every layer that ``keys`` target, and freezes all else except ``keys.train_also``.

    A layer with a frozen (``model.freeze``) or unused weight gets none. Initial adapters do not change the result: A is
    drawn like a linear layer's weight, all else is zero. On the meta device they are drawn with the other parameters.

    Raises:
        ConfigError: a pattern matches nothing, or only frozen layers; a rank is above a layer's sizes.
    """
    if keys.name == "none":
        return
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if type(module).__name__ == OTHER_LINEAR:
            module.__class__ = nn.Linear
    for name, layer in _targets(model, keys, frozen):
        _adapt(name, layer, keys)
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in named_parts(model, keys.train_also):
        matched = _matching("peft.train_also", pattern, list(named))
        for name in _without_frozen("peft.train_also", pattern, matched, frozen):
            named[name].requires_grad_(True)
    if keys.name == "qlora":
        experts = {name: module for name, module in model.named_modules() if packs_experts(module)}
        for name, module in {**_block_linears(model), **experts}.items():
            quantise_module(name, module)
    model.__dict__[ADAPTER] = keys


def adapter_of(model: nn.Module) -> PeftConfig:
    """Keys of ``model``'s adapters."""
    keys: PeftConfig = model.__dict__.get(ADAPTER) or PeftConfig()
    return keys


def is_adapter(name: str) -> bool:
    """Whether ``name`` is an adapter's parameter."""
    return name.rpartition(".")[2].endswith(ADAPTER_NAMES)


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules with adapters, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Adapted)]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without its adapters."""
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
    """Merges every adapter into its weight, in place; leaves plain layers."""
    for _, layer in lora_layers(model):
        adapters = layer.adapter_names()
        for weight, names in adapters.items():
            rows = layer.rows(weight)
            adapter = {kind: getattr(layer, attribute) for kind, attribute in names.items()}
            rows.copy_(layer.merge(rows, layer.lora_scale, adapter))
        for name in (*(attribute for names in adapters.values() for attribute in names.values()), "lora_dropout"):
            delattr(layer, name)
        layer.__class__ = type(layer).__bases__[-1]
    model.__dict__.pop(ADAPTER, None)


def _targets(model: nn.Module, keys: PeftConfig, frozen: AbstractSet[str]) -> list[tuple[str, nn.Module]]:
    """Layers that get adapters, by name; none whose parameters are ``frozen`` or unused."""
    frozen_layers = {name.rpartition(".")[0] for name in frozen if name.rpartition(".")[2] in ("weight", *WEIGHTS)}
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
                raise ConfigError("peft.targets", EXPERTS, "use peft=lora", "DoRA takes single layers only")
        elif pattern in parts:
            inside = [name for name in linear if any(fnmatchcase(name, of_part) for of_part in parts[pattern])]
            matched = [name for name in inside if name in in_blocks] or inside
        else:
            matched = _matching("peft.targets", pattern, linear)
        matched = _without_frozen("peft.targets", pattern, matched, frozen_layers)
        chosen.update({name: modules[name] for name in matched})
    if not chosen:
        raise ConfigError("peft.targets", list(keys.targets), f"use [{ALL_LINEAR}]", "no linear layer is targeted")
    return list(chosen.items())


def _block_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers of the blocks, adapted or not, except routers and unused layers."""
    idle = {id(model.get_submodule(name.rpartition(".")[0])) for name in unused_parameters(model)}
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


def _without_frozen(key: str, pattern: str, matched: Sequence[str], frozen: AbstractSet[str]) -> list[str]:
    trainable = [name for name in matched if name not in frozen]
    if matched and not trainable:
        fix = "leave it out, or take them out of model.freeze"
        raise ConfigError(key, pattern, fix, f"{matched[0]} and all else that it matches is frozen or never used")
    return trainable


def _adapt(name: str, module: Any, keys: PeftConfig) -> None:
    plain: Any = type(module)
    module.__class__ = KINDS[keys.name].get(plain) or adapted_class(plain)
    for weight in module.adapter_names():
        outputs, inputs = module.rows(weight).shape[-2:]
        if keys.r > min(inputs, outputs):
            reason = f"{name} has {inputs} inputs and {outputs} outputs"
            raise ConfigError("peft.r", keys.r, f"use at most {min(inputs, outputs)}", reason)
    module.lora_scale = keys.scale
    module.lora_dropout = nn.Dropout(keys.dropout) if keys.dropout else None
    module.adapt(keys)
