"""The parameters of a model that multiply a token, counted on the model itself."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mgpu_pipe.planner import flops
from mgpu_pipe.planner.shapes import Shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def training_flops_per_token(
    config: PretrainedConfig,
    context: float,
    model_class: str = "AutoModelForCausalLM",
    freeze: Callable[[nn.Module], object] = lambda model: None,
) -> float:
    """FLOPs of the forward and backward pass of one token among ``context`` of its document.

    Counted on a whole model of that configuration on the meta device, so whatever the caller's own was cut into.

    Args:
        freeze: freezes that model's parameters as the caller's are.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, model_class).from_config(config)
    freeze(model)
    active, trained = active_matmul_parameters(model), active_matmul_parameters(model, trained_alone=True)
    fields = config.get_text_config()
    seen = fmean(flops.windowed(context, window) for window in _windows(fields))
    return flops.training_flops_per_token(active, Shape.of(fields), seen, active - trained)


def _windows(fields: Any) -> list[int | None]:
    """The sliding window of each layer's attention; None where a token sees its whole document."""
    window, kinds = getattr(fields, "sliding_window", None), getattr(fields, "layer_types", None)
    if not getattr(fields, "use_sliding_window", True):
        window = None
    return [window if kind == "sliding_attention" else None for kind in kinds] if kinds else [window]


def active_matmul_parameters(model: PreTrainedModel, trained_alone: bool = False) -> int:
    """Parameters that a token meets in arithmetic: no lookups (a tied output head counts), chosen experts only."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head_weight}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, parameter in model.named_parameters():
        if parameter in lookups or (trained_alone and not parameter.requires_grad):
            continue
        count = parameter.numel()
        if experts and chosen and ".experts." in name and parameter.shape[0] == experts:
            count = count * chosen // experts
        total += count
    return total
