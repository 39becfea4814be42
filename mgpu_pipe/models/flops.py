"""The parameters of a model that multiply a token, counted on the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mgpu_pipe.planner import flops
from mgpu_pipe.planner.shapes import Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def training_flops_per_token(
    config: PretrainedConfig, context: float, model_class: str = "AutoModelForCausalLM"
) -> float:
    """FLOPs of the forward and backward pass of one token among ``context`` of its document.

    Counted on a whole model of that configuration on the meta device, so whatever the caller's own was cut into.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, model_class).from_config(config)
    shape = Shape.of(config.get_text_config())
    return flops.training_flops_per_token(active_matmul_parameters(model), shape, context)


def active_matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters that a token meets in arithmetic: no lookups (a tied output head counts), chosen experts only."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head_weight}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, parameter in model.named_parameters():
        if parameter in lookups:
            continue
        count = parameter.numel()
        if experts and chosen and ".experts." in name and parameter.shape[0] == experts:
            count = count * chosen // experts
        total += count
    return total
