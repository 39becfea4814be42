"""Which axes a family of models can be spread over. No torch."""

from __future__ import annotations


def axes_of(model_type: str) -> str:
    """Their names, for the error that one of them is not among them."""
    from mgpu_pipe.families.find import stages_of
    from mgpu_pipe.models.context_checks import BY_INTERFACE
    from mgpu_pipe.models.experts import EXPERT_FAMILIES
    from mgpu_pipe.models.tensor_plans import has_tensor_plan

    has = {
        "tp": has_tensor_plan(model_type),
        "pp": stages_of(model_type) is not None,
        "cp": model_type in BY_INTERFACE,
        "ep": model_type in EXPERT_FAMILIES,
    }
    return ", ".join(["dp_replicate", "dp_shard", *(axis for axis, there in has.items() if there)])
