"""Units of a model that are sharded together: by transformers' plan, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mgpu_pipe.models.stage_placeholders import is_removed

_SCALARS = "_scalar_parameters"


def scalars_to_vectors(model: nn.Module) -> None:
    """Turns every scalar parameter of ``model`` into a vector, in place."""
    names = set(scalar_names(model))
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 0:
                module._parameters[name] = nn.Parameter(parameter.data.reshape(1), parameter.requires_grad)
                names.add(f"{prefix}.{name}" if prefix else name)
    if names:
        setattr(model, _SCALARS, frozenset(names))


def scalar_names(model: nn.Module) -> frozenset[str]:
    """Names of parameters that are scalars in transformers."""
    names: frozenset[str] = getattr(model, _SCALARS, frozenset())
    return names


def as_saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` in transformers' shapes."""
    scalars = scalar_names(model)
    return {name: value.reshape(()) if name in scalars else value for name, value in tensors.items()}


KEEP = "keep_full_weight"
"""transformers' style of weights that the backward pass needs first, so freeing them gains nothing."""


@dataclass(frozen=True)
class FsdpUnit:
    """Modules with parameters that are gathered and reduced together."""

    modules: tuple[nn.Module, ...]
    keep: bool = False
    """Whether weights stay gathered between forward and backward pass."""
    in_backward: bool = True
    """Whether the backward pass needs the weights; that of a lookup does not."""


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """Repeated blocks of a model, in every tower (encoder and decoder of T5, both sides of CLIP).

    A tower is an outermost ``ModuleList`` of composite modules that have one class or that transformers marks as
    blocks. A pipeline stage returns only its blocks.
    """
    lists: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            blocks = [block for block in child.children() if not is_removed(block)]
            if isinstance(child, nn.ModuleList) and _are_alike(blocks):
                lists.extend(blocks)
            else:
                visit(child)

    visit(model)
    return lists


def _are_alike(blocks: list[nn.Module]) -> bool:
    composite = all(any(True for _ in block.children()) for block in blocks)
    marked = all(isinstance(block, GradientCheckpointingLayer) for block in blocks)
    return bool(blocks) and composite and (marked or len({type(block) for block in blocks}) == 1)


def sharding_units(model: nn.Module) -> list[FsdpUnit]:
    """Units of ``model`` in the order of its forward pass; the root unit has the rest.

    A plan names the input embeddings, the blocks, the last norm and the output head. The last two are one unit, since
    they run one after the other at the turn from forward to backward. Tied embeddings stay in the root unit, where both
    modules see the gathered weights. Blocks without a plan are units too: those of other towers, or of a model without
    a plan.
    """
    plan = _library_plan(model)
    modules = dict(model.named_modules())
    planned = {name: style for name, style in plan.items() if name in modules}
    matching = [modules[name] for pattern in plan if "*" in pattern for name in _matches(pattern, modules)]
    blocks = [module for module in matching if not is_removed(module)]
    inside = {id(part) for block in blocks for part in block.modules()}
    others = [block for block in decoder_blocks(model) if not any(id(part) in inside for part in block.modules())]
    if not blocks:
        return [FsdpUnit((block,)) for block in others]
    order = {id(module): number for number, module in enumerate(modules.values())}
    blocks = sorted([*blocks, *others], key=lambda block: order[id(block)])
    tied = {id(module) for module in _tied_modules(model)}
    before, gathered = [], []
    for name, style in planned.items():
        module = modules[name]
        if id(module) in tied or not any(True for _ in module.parameters()):
            continue
        if style == KEEP:
            gathered.append(module)
        else:
            before.append(FsdpUnit((module,), in_backward=not isinstance(module, nn.Embedding)))
    units = [*before, *(FsdpUnit((block,)) for block in blocks)]
    return [*units, FsdpUnit(tuple(gathered), keep=True)] if gathered else units


def _library_plan(model: nn.Module) -> dict[str, str]:
    """transformers' plan of the model in the order of the forward pass: base model first, then head."""
    plan = getattr(model, "fsdp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    entries = {name: style for name, style in plan.items() if isinstance(name, str) and isinstance(style, str)}
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(entries.items(), key=lambda entry: order.get(entry[0].replace("*", "0"), len(order))))


def _matches(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names that ``pattern`` matches; ``*`` is a layer's number."""
    words = pattern.split(".")
    matching = []
    for name in modules:
        parts = name.split(".")
        if len(parts) != len(words):
            continue
        if all(word in (part, "*" if part.isdigit() else part) for word, part in zip(words, parts, strict=True)):
            matching.append(name)
    return matching


def _tied_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that share a parameter with another module."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    return [module for several in holders.values() if len(several) > 1 for module in several]
