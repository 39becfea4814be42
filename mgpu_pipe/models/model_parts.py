"""A model's parts, found by its own structure: what holds the configuration of a tower is that tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from mgpu_pipe.families.find import family_of
from mgpu_pipe.families.parts import CONFIGS, PARTS, PROJECTOR


def part_patterns(model: nn.Module) -> dict[str, list[str]]:
    """For each part of ``model`` patterns of its parameters' names; none for a model of one piece.

    The language part has the input embeddings and the output head too, and what is in no other part is the projector.
    """
    root: Any = getattr(model, "config", None)
    configs = {part: getattr(root, field, None) for part, field in CONFIGS.items()}
    towers = {part: _holders(model, config) for part, config in configs.items() if config is not None}
    if sum(map(bool, towers.values())) < 2:
        return {}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
    if "language" in towers and isinstance(head, nn.Module):
        towers["language"].append(names[id(head)])
    inside = tuple(f"{name}." for several in towers.values() for name in several)
    found = {part: [f"{name}.*" for name in several] for part, several in towers.items()}
    bridges = family_of(str(root.model_type)).projector  # inside of a tower
    between = [name for name in names.values() if name.startswith(inside) and name.rpartition(".")[2] in bridges]
    if between:
        left_out = tuple(f"{name}." for name in between)
        towers_alone = (_rest(model.get_submodule(name), f"{name}.", left_out) for name in towers["vision"])
        found["vision"] = [pattern for several in towers_alone for pattern in several]
    return {**found, PROJECTOR: [*(f"{name}.*" for name in between), *_rest(model, "", inside)]}


def named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """``patterns`` of parameter names with the patterns of a part in the place of its name."""
    if not set(patterns) & set(PARTS):
        return list(patterns)
    parts = part_patterns(model)
    return [one for pattern in patterns for one in parts.get(pattern, [pattern])]


def _holders(model: nn.Module, config: Any) -> list[str]:
    """The outermost modules that have a configuration of that kind."""
    found: list[str] = []
    for name, module in model.named_modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if name and kind == config.model_type and not name.startswith(tuple(f"{one}." for one in found)):
            found.append(name)
    return found


def _rest(module: nn.Module, prefix: str, inside: tuple[str, ...]) -> Iterator[str]:
    """Patterns of the largest modules, and names of the parameters, that have nothing of what is ``inside``."""
    yield from (f"{prefix}{name}" for name, one in module._parameters.items() if one is not None)
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        if path.startswith(inside) or not any(True for _ in child.parameters()):
            continue
        if any(one.startswith(path) for one in inside):
            yield from _rest(child, path, inside)
        else:
            yield f"{path}*"


def never_used(model: nn.Module) -> list[str]:
    """Parameters that no forward pass reads: of LLaVA's tower what lies behind the layer whose vectors are taken.

    They get no gradient, which DeepSpeed takes for one of zero; frozen they are the same under every engine.
    """
    root: Any = getattr(model, "config", None)
    taken, tower = getattr(root, "vision_feature_layer", None), part_patterns(model).get("vision")
    if taken is None or not tower:
        return []
    prefix = tower[0].removesuffix("*")
    encoder: Any = model.get_submodule(f"{prefix}encoder")
    layers = len(encoder.layers)
    last = max(one if one >= 0 else layers + 1 + one for one in ([taken] if isinstance(taken, int) else taken))
    behind = tuple(f"{prefix}encoder.layers.{number}." for number in range(last, layers))
    after = (*behind, f"{prefix}post_layernorm.", f"{prefix}head.")
    return [name for name, _ in model.named_parameters() if name.startswith(after)]
