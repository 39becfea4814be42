"""Parallel plans of transformers' configuration classes, read from source."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mgpu_pipe.architectures.config_source import class_statement
from mgpu_pipe.architectures.family import Stages, Style

STYLES: Mapping[str, Style | None] = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "packed",
    "replicated_with_grad_allreduce": "own_heads",
    "moe_tp_experts": "experts",
    # These two come in pairs around modules that cannot be cut; whole on every rank they compute the same.
    "colwise_gather_output": None,
    "rowwise_split_input": None,
    "replicate": None,
    "embedding_rowwise": None,
}
"""transformers' styles; None: whole (the vocabulary is cut by :mod:`mgpu_pipe.parallel.tensor.heads`)."""


@lru_cache(maxsize=64)
def library_plan(model_type: str, name: str) -> Mapping[str, Any]:
    """Plan ``name`` of the family's configuration class; empty without one."""
    statement = class_statement(model_type)
    for item in statement.body if statement is not None else []:
        if not isinstance(item, ast.Assign):
            continue
        if name in [target.id for target in item.targets if isinstance(target, ast.Name)]:
            try:
                plan = ast.literal_eval(item.value)
            except ValueError:  # built from other plans
                return {}
            return dict(plan) if isinstance(plan, dict) else {}
    return {}


def library_stages(model_type: str) -> Stages | None:
    """Pipeline stages from ``base_model_pp_plan``; None unless it is embedding, one list of blocks and norm.

    The plan has each module's inputs and outputs in the order of the forward pass.
    """
    plan = library_plan(model_type, "base_model_pp_plan")
    names = list(plan)
    blocks = [name for name, (inputs, _) in plan.items() if inputs == ["hidden_states", "attention_mask"]]
    if len(blocks) != 1 or len(names) < 3 or names[-2] != blocks[0]:
        return None
    return Stages(names[0], blocks[0], names[-1], after_embedding=tuple(names[1:-2]))
