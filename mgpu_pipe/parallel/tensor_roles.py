"""Which modules of a model tensor parallelism cuts, and how: transformers' own plan, and the families' files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.brought import STYLES
from mgpu_pipe.families.family import COLUMNS, SequencePlan, Style
from mgpu_pipe.families.find import families_with, family_of, tensor_if_errors

KEY_VALUE = ("k_proj", "v_proj")
"""Layers cut by key-value heads, of which there may be fewer than ranks."""
SEVERAL_INPUTS = ("encoder_attn", "crossattention", "EncDecAttention")
"""Modules whose column-parallel layers take other inputs than the hidden states."""


def tensor_plan(model: nn.Module) -> dict[str, Style]:
    """How each module (or bare parameter) of ``model`` is cut, by its name.

    Raises:
        ConfigError: no plan, or one with a style that is not known here.
    """
    modules = dict(model.named_modules())
    refused = tensor_if_errors(vars(getattr(model, "config", None) or object), _model_type(model), 2)
    if refused:
        raise refused[0]
    plan: dict[str, Style] = {}
    own: dict[str, Mapping[str, Style]] = {}
    for model_type in {_model_type(module) for module in modules.values() if hasattr(module, "config")}:
        own.update(family_of(model_type).modules)
    for name, module in modules.items():
        for child, style in own.get(type(module).__name__, {}).items():
            if style == "per_head" or isinstance(getattr(module, child, None), nn.Module | nn.Parameter):
                plan[f"{name}.{child}" if name else child] = style
    names = [*modules, *(name for name, _ in model.named_parameters())]
    brought = getattr(model, "tp_plan", None) or {}
    for pattern, brought_style in brought.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        matches = [name for name in names if matching(name)]
        if matches and brought_style not in STYLES:
            reason = f"the {_model_type(model)} family's plan cuts {pattern} in a way that is not known here"
            raise ConfigError("strategy.tp", brought_style, "use strategy.tp=1", reason)
        known = STYLES.get(brought_style)
        plan.update({name: known for name in matches if known is not None})
    if not any(style in COLUMNS for style in plan.values()):
        raise ConfigError(
            "model.type", _model_type(model), "use strategy.tp=1", "the family has no plan for tensor parallelism"
        )
    return plan


def sequence_plan(model: nn.Module) -> SequencePlan:
    """Where ``model``'s sequence is split.

    Raises:
        ConfigError: a family without a plan for sequence parallelism.
    """
    plan = family_of(_model_type(model)).sequence
    if plan is None:
        raise ConfigError(
            "strategy.sequence_parallel",
            True,
            "use strategy.sequence_parallel=false",
            f"the {_model_type(model)} family has no plan for it; these have: "
            + ", ".join(families_with(lambda family: family.sequence)),
        )
    return plan


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
