"""Active parameters and training FLOPs per token, counted on a model."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mgpu_pipe.architectures.formulas import flops
from mgpu_pipe.architectures.formulas.flops import Shape
from mgpu_pipe.models.fields import CAUSAL, model_types

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def training_flops_per_token(
    config: PretrainedConfig,
    context: float,
    model_class: str = "AutoModelForCausalLM",
    freeze: Callable[[nn.Module], object] = lambda model: None,
) -> float:
    """FLOPs of forward and backward pass of one token among ``context`` of its document.

    They are counted on a whole model of ``config`` on the meta device, so the caller's model may be sharded.

    Args:
        freeze: freezes that model's parameters like the caller's.
    """
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, model_class).from_config(config)
    freeze(model)
    active, trained = active_matmul_parameters(model), active_matmul_parameters(model, only_trained=True)
    fields = config.get_text_config()
    if _sees_both_ways(fields):
        # twice what a causal model sees of the same document
        seen = fmean(2 * min(context, 2 * window + 1 if window else context) for window in _windows(fields))
    else:
        seen = fmean(flops.windowed_context(context, window) for window in _windows(fields))
    return flops.training_flops_per_token(active, Shape.from_fields(fields), seen, active - trained)


def _sees_both_ways(config: Any) -> bool:
    """Whether every token sees those after it too."""
    is_encoder = config.model_type in model_types("AutoModelForMaskedLM") and not getattr(config, "is_decoder", False)
    return (is_encoder and not config.is_encoder_decoder) or not getattr(config, CAUSAL, True)


def _windows(fields: Any) -> list[int | None]:
    """Sliding window of each layer's attention; None if a token sees its whole document."""
    window, kinds = getattr(fields, "sliding_window", None), getattr(fields, "layer_types", None)
    if not getattr(fields, "use_sliding_window", True):
        window = None
    return [window if kind == "sliding_attention" else None for kind in kinds] if kinds else [window]


def active_matmul_parameters(model: PreTrainedModel, only_trained: bool = False) -> int:
    """Parameters that multiply a token: no lookups (a tied output head counts), only chosen experts."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    lookups = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {head_weight}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, parameter in model.named_parameters():
        if parameter in lookups or (only_trained and not parameter.requires_grad):
            continue
        count = parameter.numel()
        if experts and chosen and ".experts." in name and parameter.shape[0] == experts:
            count = count * chosen // experts
        total += count
    return total
