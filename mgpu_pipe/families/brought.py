"""Plans that transformers' configuration classes bring, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mgpu_pipe.families.config_source import class_statement
from mgpu_pipe.families.family import Stages, Style

STYLES: Mapping[str, Style | None] = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "packed",
    "replicated_with_grad_allreduce": "own_heads",
    "moe_tp_experts": "experts",
    # These two come in pairs around what cannot be cut: whole on every rank they compute the same.
    "colwise_gather_output": None,
    "rowwise_split_input": None,
    "replicate": None,
    "embedding_rowwise": None,
}
"""transformers' names; None leaves a module whole (the vocabulary is cut by :mod:`mgpu_pipe.parallel.vocabulary`)."""


@lru_cache(maxsize=64)
def brought_plan(model_type: str, name: str) -> Mapping[str, Any]:
    """The plan called ``name`` of the family's configuration class; empty where there is none."""
    statement = class_statement(model_type)
    for item in statement.body if statement is not None else []:
        if not isinstance(item, ast.Assign):
            continue
        if name in [target.id for target in item.targets if isinstance(target, ast.Name)]:
            try:
                plan = ast.literal_eval(item.value)
            except ValueError:  # put together from other plans
                return {}
            return dict(plan) if isinstance(plan, dict) else {}
    return {}


def brought_stages(model_type: str) -> Stages | None:
    """The pipeline's stages after ``base_model_pp_plan``; None unless it is embedding, one list of blocks and norm.

    The plan gives each module's inputs and outputs, in the order of the forward pass.
    """
    plan = brought_plan(model_type, "base_model_pp_plan")
    names = list(plan)
    blocks = [name for name, (inputs, _) in plan.items() if inputs == ["hidden_states", "attention_mask"]]
    if len(blocks) != 1 or len(names) < 3 or names[-2] != blocks[0]:
        return None
    return Stages(names[0], blocks[0], names[-1], after_embedding=tuple(names[1:-2]))
