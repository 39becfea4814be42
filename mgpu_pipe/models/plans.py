"""Which parts of a model are sharded together: transformers' own plan, or its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mgpu_pipe.models.stage_placeholders import is_removed

KEEP = "keep_full_weight"
"""transformers' word for weights that the backward pass needs first, so that freeing them gains nothing."""


@dataclass(frozen=True)
class FsdpUnit:
    """Modules whose parameters are gathered and reduced together."""

    modules: tuple[nn.Module, ...]
    keep: bool = False
    """Stays gathered between its forward and its backward pass."""
    in_backward: bool = True
    """Whether the backward pass needs the weights; a lookup's does not."""


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in every tower (the encoder and the decoder of T5, both sides of CLIP).

    A tower is a ``ModuleList`` outside of all others whose members are modules of modules, and of one class or what
    transformers marks as a block. Of a pipeline stage's, those that it has.
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
    """The units of ``model`` in the order of its forward pass; what is in none belongs to the whole model's own.

    A plan names the input embeddings, the blocks, the last norm and the output head. The last two are one unit, for
    they run one after the other at the turn from forward to backward. Tied embeddings stay with the whole model,
    where both of their modules see the gathered weights. Blocks that a plan does not name are units too: those of the
    other towers, or of a model without a plan.
    """
    plan = _own_plan(model)
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
    before, kept = [], []
    for name, style in planned.items():
        module = modules[name]
        if id(module) in tied or not any(True for _ in module.parameters()):
            continue
        if style == KEEP:
            kept.append(module)
        else:
            before.append(FsdpUnit((module,), in_backward=not isinstance(module, nn.Embedding)))
    units = [*before, *(FsdpUnit((block,)) for block in blocks)]
    return [*units, FsdpUnit(tuple(kept), keep=True)] if kept else units


def _own_plan(model: nn.Module) -> dict[str, str]:
    """transformers' plan of the model, the forward pass's order kept: the base model's first, then the head's."""
    plan = getattr(model, "fsdp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    entries = {name: style for name, style in plan.items() if isinstance(name, str) and isinstance(style, str)}
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(entries.items(), key=lambda entry: order.get(entry[0].replace("*", "0"), len(order))))


def _matches(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names that ``pattern`` matches, ``*`` standing for a layer's number."""
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
    """Modules that hold a parameter which another module holds too."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(module)
    return [module for several in holders.values() if len(several) > 1 for module in several]
