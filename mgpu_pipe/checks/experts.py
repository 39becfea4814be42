"""Which families are mixtures of experts that can be spread over processes, and what their sizes allow. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.find import axes_of, families_with, family_of


def expert_count(fields: Mapping[str, Any], model_type: str) -> int | None:
    """The experts of a layer, from the fields of a model's configuration; None where the family has none here."""
    number = fields.get(family_of(model_type).experts)
    return number if isinstance(number, int) else None


def expert_parallel_errors(
    fields: Mapping[str, Any], model_type: str, ep: int, sizes: Sequence[int] | None = None
) -> list[ConfigError]:
    """What is wrong with ``strategy.ep``, knowing the model.

    Args:
        fields: of the model's configuration, see ``resolved_fields``.
        ep: the resolved size.
        sizes: the values of ``strategy.ep`` that the mesh allows, where they are known.
    """
    if ep == 1:
        return []
    if not family_of(model_type).experts:
        others = ", ".join(families_with(lambda family: family.experts))
        reason = f"the {model_type} family has no experts that can be spread; those with: {others}"
        fix = f"use 1 (the axes for it are {axes_of(model_type)}), or a mixture of experts"
        return [ConfigError("strategy.ep", ep, fix, reason)]
    number = expert_count(fields, model_type)
    if number is None or number % ep == 0:
        return []
    fits = [size for size in range(1, number + 1) if number % size == 0 and (sizes is None or size in sizes)]
    named = f"model.config.{family_of(model_type).experts}"
    if not any(size > 1 for size in fits):
        fix = f"use 1, or a multiple of {ep} as {named}"
    else:
        fix = f"use {' or '.join(map(str, fits))}"
    return [ConfigError("strategy.ep", ep, fix, f"does not divide {named}={number}")]


def router_loss_errors(model_type: str, coefficient: float) -> list[ConfigError]:
    """What is wrong with ``objective.router_aux_loss``, knowing the model's family."""
    key = "objective.router_aux_loss"
    if coefficient < 0:
        return [ConfigError(key, coefficient, "use 0 or more")]
    if coefficient == 0 or family_of(model_type).softmax_routers:
        return []
    others = ", ".join(families_with(lambda family: family.softmax_routers))
    if family_of(model_type).experts:
        reason = f"routers of the {model_type} family do not choose by softmax; those that do: "
        return [ConfigError(key, coefficient, "use 0", reason + others)]
    reason = f"the {model_type} family has no routers; those with: {others}"
    return [ConfigError(key, coefficient, "use 0, or a mixture of experts", reason)]
