"""Which families are mixtures of experts that can be spread over processes, and what their sizes allow. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.axes import axes_of

EXPERT_FAMILIES = {
    "afmoe": "num_experts",
    "bailing_hybrid": "num_experts",
    "cohere2_moe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "exaone_moe": "num_experts",
    "flex_olmo": "num_experts",
    "glm4_moe": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts",
    "hunyuan_v1_moe": "num_experts",
    "jamba": "num_experts",
    "laguna": "num_experts",
    "mellum": "num_local_experts",
    "minimax": "num_local_experts",
    "minimax_m2": "num_local_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "qwen3_next": "num_experts",
    "solar_open": "n_routed_experts",
}
"""Families whose experts are packed in one module that their ``ep_plan`` names, by the field that numbers the experts.
Each was tried: two processes give the gradients of one. (Phi-MoE is left out: its router draws lots in training.)"""

BALANCED_FAMILIES = frozenset(
    [
        "ernie4_5_moe",
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "jamba",
        "mellum",
        "minimax",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
    ]
)
"""Those whose routers take the softmax of their logits. The others balance by a bias or by sigmoid scores."""


def expert_count(fields: Mapping[str, Any], model_type: str) -> int | None:
    """The experts of a layer, from the fields of a model's configuration; None where the family has none here."""
    number = fields.get(EXPERT_FAMILIES.get(model_type, ""))
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
    if model_type not in EXPERT_FAMILIES:
        reason = f"the {model_type} family has no experts that can be spread; those with: {_listed(EXPERT_FAMILIES)}"
        fix = f"use 1 (the axes for it are {axes_of(model_type)}), or a mixture of experts"
        return [ConfigError("strategy.ep", ep, fix, reason)]
    number = expert_count(fields, model_type)
    if number is None or number % ep == 0:
        return []
    fits = [size for size in range(1, number + 1) if number % size == 0 and (sizes is None or size in sizes)]
    named = f"model.config.{EXPERT_FAMILIES[model_type]}={number}"
    if not any(size > 1 for size in fits):
        fix = f"use 1, or a multiple of {ep} as model.config.{EXPERT_FAMILIES[model_type]}"
    else:
        fix = f"use {' or '.join(map(str, fits))}"
    return [ConfigError("strategy.ep", ep, fix, f"does not divide {named}")]


def router_loss_errors(model_type: str, coefficient: float) -> list[ConfigError]:
    """What is wrong with ``objective.router_aux_loss``, knowing the model's family."""
    key = "objective.router_aux_loss"
    if coefficient < 0:
        return [ConfigError(key, coefficient, "use 0 or more")]
    if coefficient == 0 or model_type in BALANCED_FAMILIES:
        return []
    if model_type in EXPERT_FAMILIES:
        reason = f"routers of the {model_type} family do not choose by softmax; those that do: "
        return [ConfigError(key, coefficient, "use 0", reason + _listed(BALANCED_FAMILIES))]
    reason = f"the {model_type} family has no routers; those with: {_listed(BALANCED_FAMILIES)}"
    return [ConfigError(key, coefficient, "use 0, or a mixture of experts", reason)]


def _listed(families: Mapping[str, str] | frozenset[str]) -> str:
    return ", ".join(sorted(families))
