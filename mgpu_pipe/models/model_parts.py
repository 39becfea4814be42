"""Parts of a model, found by structure: the module with a tower's configuration is that tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from mgpu_pipe.architectures.family import CONFIGS, PARTS, PROJECTOR
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError

STACKS = ("encoder.layers", "encoder.layer", "transformer.layers")
"""Names of the layers of a tower."""


def part_patterns(model: nn.Module) -> dict[str, list[str]]:
    """Patterns of parameter names for each part of ``model``; none for a model of one piece.

    The language part includes input embeddings and output head. Everything in no other part is the projector.
    """
    root: Any = getattr(model, "config", None)
    configs = {part: getattr(root, field, None) for part, field in CONFIGS.items()}
    towers = {part: _holders(model, config) for part, config in configs.items() if config is not None}
    if sum(map(bool, towers.values())) < 2:
        return {}
    family = family_of(str(root.model_type))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
    if family.language:  # its configuration is the model's
        towers["language"] = [f"{model.base_model_prefix}.{name}" for name in family.language]
        towers["audio"] = [name for name in names.values() if name.rpartition(".")[2] in family.untrained]
    if "language" in towers and isinstance(head, nn.Module):
        towers["language"].append(names[id(head)])
    inside = tuple(f"{name}." for several in towers.values() for name in several)
    patterns = {part: [f"{name}.*" for name in several] for part, several in towers.items()}
    bridges = family.projector  # these lie inside a tower
    between = [name for name in names.values() if name.startswith(inside) and name.rpartition(".")[2] in bridges]
    if between:
        left_out = tuple(f"{name}." for name in between)
        towers_alone = (_rest(model.get_submodule(name), f"{name}.", left_out) for name in towers["vision"])
        patterns["vision"] = [pattern for several in towers_alone for pattern in several]
    return {**patterns, PROJECTOR: [*(f"{name}.*" for name in between), *_rest(model, "", inside)]}


def tower_names(model: nn.Module, parts: Sequence[str]) -> dict[str, str]:
    """Name of the module that is each of these ``parts`` of ``model``."""
    root: Any = getattr(model, "config", None)
    return {part: _holders(model, getattr(root, CONFIGS[part]))[0] for part in parts}


def present_towers(model: nn.Module) -> list[str]:
    """Names of the vision and audio towers of ``model``; a later pipeline stage has none."""
    root: Any = getattr(model, "config", None)
    configs = [getattr(root, field, None) for part, field in CONFIGS.items() if part != "language"]
    return [name for config in configs if config is not None for name in _holders(model, config)]


def named_parts(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """``patterns`` of parameter names, with names of parts replaced by their patterns."""
    if not set(patterns) & set(PARTS):
        return list(patterns)
    parts = part_patterns(model)
    return [name for pattern in patterns for name in parts.get(pattern, [pattern])]


def _holders(model: nn.Module, config: Any) -> list[str]:
    """Names of the outermost modules with a configuration of the type of ``config``."""
    holders: list[str] = []
    for name, module in model.named_modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if name and kind == config.model_type and not name.startswith(tuple(f"{holder}." for holder in holders)):
            holders.append(name)
    return holders


def _rest(module: nn.Module, prefix: str, inside: tuple[str, ...]) -> Iterator[str]:
    """Patterns of the largest modules, and names of parameters, that contain nothing with a prefix ``inside``."""
    yield from (f"{prefix}{name}" for name, parameter in module._parameters.items() if parameter is not None)
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        if path.startswith(inside) or not any(True for _ in child.parameters()):
            continue
        if any(prefix_inside.startswith(path) for prefix_inside in inside):
            yield from _rest(child, path, inside)
        else:
            yield f"{path}*"


def unused_parameters(model: nn.Module) -> list[str]:
    """Parameters that no forward pass reads: those of LLaVA's tower after its last used layer, embeddings that the
    code of Qwen2.5-Omni leaves out, and modules that no objective runs.

    They get no gradient, which DeepSpeed treats as zero. Frozen they are equal under every engine.
    """
    root: Any = getattr(model, "config", None)
    vision, family = getattr(root, "vision_config", None), family_of(str(getattr(root, "model_type", "")))
    taken = getattr(root, "vision_feature_layer", getattr(vision, "feature_layer", None))
    tower = part_patterns(model).get("vision")
    if family.recordings:
        return [name for name, _ in model.named_parameters() if ".audio_bos_eos_token." in name]
    if taken is None or not tower:
        return []
    prefix = tower[0].removesuffix("*")
    inside = dict(model.get_submodule(prefix[:-1]).named_modules())
    stack = next(name for name in STACKS if name in inside)
    layers = len(cast(nn.ModuleList, inside[stack]))
    chosen = [taken] if isinstance(taken, int) else taken
    last = max(layer if layer >= 0 else layers + 1 + layer for layer in chosen)
    after = tuple(f"{prefix}{stack}.{number}." for number in range(last, layers))
    unused = (*after, f"{prefix}post_layernorm.", f"{prefix}head.")
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if name.startswith(unused) or set(name.split(".")) & set(family.untrained)]


def show_pictures_both_ways(model: nn.Module) -> None:
    """Makes attention bidirectional in the vision tower of ``model``, in place.

    That of Phi-4 multimodal says it is causal, which transformers follows where every patch is seen.
    """
    root: Any = getattr(model, "config", None)
    towers = _holders(model, vision) if (vision := getattr(root, "vision_config", None)) is not None else []
    for module in (module for tower in towers for module in model.get_submodule(tower).modules()):
        if getattr(module, "is_causal", False):
            cast(Any, module).is_causal = False


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freezes the parameters that ``patterns`` match (``*``, ``?``, ``[...]``, or a part); returns their names.

    It also freezes unused parameters.

    Raises:
        ConfigError: a pattern that matches nothing, or nothing left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    frozen = unused_parameters(model)
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
        raise ConfigError("model.freeze", list(patterns), "leave some parameters out", "no parameter is left to train")
    return frozen
