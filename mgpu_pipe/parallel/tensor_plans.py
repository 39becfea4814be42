"""Which modules tensor parallelism cuts, and how: transformers' plans, and this project's own for models without one.

With :mod:`mgpu_pipe.models.tensor_sizes`, which says the same of a configuration before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from mgpu_pipe.errors import ConfigError

Style = Literal["column", "row", "packed", "own_heads", "experts"]
"""``column`` and ``row`` parallel; ``packed``: columns of several fused matrices; ``own_heads``: whole on every rank,
each of which applies it to its own heads; ``experts``: a module that calls cut experts."""

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

_ATTENTION: dict[str, Style] = {"q_proj": "column", "k_proj": "column", "v_proj": "column"}
_FC: dict[str, Style] = {"fc1": "column", "fc2": "row"}
OWN_PLANS: Mapping[str, Mapping[str, Style]] = {
    "GPT2Attention": {"c_attn": "packed", "q_attn": "column", "c_proj": "row"},
    "GPT2MLP": {"c_fc": "column", "c_proj": "row"},
    "CLIPAttention": {**_ATTENTION, "out_proj": "row"},
    "CLIPMLP": _FC,
    "SiglipAttention": {**_ATTENTION, "out_proj": "row"},
    "SiglipMLP": _FC,
    "ViTAttention": {**_ATTENTION, "o_proj": "row"},
    "ViTMLP": _FC,
    "Wav2Vec2Attention": {**_ATTENTION, "out_proj": "row"},
    "Wav2Vec2FeedForward": {"intermediate_dense": "column", "output_dense": "row"},
    "WhisperAttention": {**_ATTENTION, "out_proj": "row"},
    "WhisperEncoderLayer": _FC,
    "WhisperDecoderLayer": _FC,
    "LlavaMultiModalProjector": {"linear_1": "column", "linear_2": "row"},
}
"""By a module's class, so that they hold wherever it is part of a larger model."""

KEY_VALUE = ("k_proj", "v_proj")
"""Layers cut by key-value heads, of which there may be fewer than ranks."""
SEVERAL_INPUTS = ("encoder_attn", "crossattention")
"""Modules whose column-parallel layers take other inputs than the hidden states."""


@dataclass(frozen=True)
class SequencePlan:
    """Where a family's sequence is split: between the embeddings, which are only scaled or added to, and the norm."""

    blocks: str = "layers"
    norm: str = "norm"
    addends: tuple[str, ...] = ()
    """Embeddings that are added to the tokens' own."""


SEQUENCE_PLANS: Mapping[str, SequencePlan] = {
    "gpt2": SequencePlan("h", "ln_f", ("wpe",)),
    **{family: SequencePlan() for family in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")},
}


def tensor_plan(model: nn.Module) -> dict[str, Style]:
    """How each module (or bare parameter) of ``model`` is cut, by its name.

    Raises:
        ConfigError: no plan, or one with a style that is not known here.
    """
    modules = dict(model.named_modules())
    found: dict[str, Style] = {}
    for name, module in modules.items():
        for child, style in OWN_PLANS.get(type(module).__name__, {}).items():
            if isinstance(getattr(module, child, None), nn.Module):
                found[f"{name}.{child}" if name else child] = style
    names = [*modules, *(name for name, _ in model.named_parameters())]
    brought = getattr(model, "tp_plan", None) or {}
    for pattern, style_name in brought.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        matches = [name for name in names if matching(name)]
        if matches and style_name not in STYLES:
            raise ConfigError(
                "strategy.tp", style_name, "use strategy.tp=1",
                f"the {_model_type(model)} family's plan cuts {pattern} in a way that is not known here",
            )
        style = STYLES.get(style_name)
        found.update({name: style for name in matches if style is not None})
    if not any(style in ("column", "packed") for style in found.values()):
        raise ConfigError(
            "model.type", _model_type(model), "use strategy.tp=1", "the family has no plan for tensor parallelism"
        )
    return found


def sequence_plan(model: nn.Module) -> SequencePlan:
    """Where ``model``'s sequence is split.

    Raises:
        ConfigError: a family without a plan for sequence parallelism.
    """
    plan = SEQUENCE_PLANS.get(_model_type(model))
    if plan is None:
        raise ConfigError(
            "strategy.sequence_parallel", True, "use strategy.sequence_parallel=false",
            f"the {_model_type(model)} family has no plan for it; these have: {', '.join(sorted(SEQUENCE_PLANS))}",
        )
    return plan


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


