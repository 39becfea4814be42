"""What tensor parallelism can cut of each family, and the sizes it takes; needs no torch.

Plans are transformers' own (``base_model_tp_plan`` of a configuration class) and, for families that bring none, this
project's. :mod:`mgpu_pipe.parallel.tensor_roles` applies the same tables to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.brought import brought_plan
from mgpu_pipe.models.axes import axes_of

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
OWN_FAMILIES = frozenset(
    [
        "gpt2",
        "clip",
        "clip_vision_model",
        "clip_text_model",
        "siglip",
        "siglip_vision_model",
        "siglip_text_model",
        "vit",
        "wav2vec2",
        "whisper",
        "llava",
    ]
)
"""Families of which those classes are the blocks."""


UNCUT_FAMILIES = frozenset(["doge", "inkling2_text"])
"""Families whose own plan does not give what one process computes: Doge's masks have weights for each head, Inkling 2
has a norm inside its embedding."""


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


def has_tensor_plan(model_type: str) -> bool:
    """Whether tensor parallelism can cut the family."""
    if model_type in UNCUT_FAMILIES:
        return False
    styles = brought_plan(model_type, "base_model_tp_plan").values()
    cuts = any(STYLES.get(style) in ("column", "packed") for style in styles)
    return model_type in OWN_FAMILIES or (cuts and all(style in STYLES for style in styles))


def tensor_parallel_errors(
    fields: Mapping[str, Any], model_type: str, tp: int, sequence_parallel: bool, seq_len: int
) -> list[ConfigError]:
    """What keeps a model of these sizes from being cut over ``tp`` ranks.

    Args:
        fields: of the model's configuration, standard names among them, as
            :func:`mgpu_pipe.models.fields.resolved_fields` gives them.
    """
    if tp == 1:
        return []
    if not has_tensor_plan(model_type):
        return [
            ConfigError(
                "strategy.tp",
                tp,
                f"use strategy.tp=1; the axes for it are {axes_of(model_type)}",
                f"the {model_type} family has no plan for tensor parallelism",
            )
        ]
    limits = list(_limits(fields, model_type))
    fits = [size for size in range(1, _largest(fields, tp) + 1) if all(fit(size) for _, fit in limits)]
    errors = [ConfigError("strategy.tp", tp, f"use one of {fits}", what) for what, fit in limits if not fit(tp)]
    if sequence_parallel and model_type not in SEQUENCE_PLANS:
        errors.append(
            ConfigError(
                "strategy.sequence_parallel",
                True,
                "use strategy.sequence_parallel=false",
                f"the {model_type} family has no plan for it; these have: {', '.join(sorted(SEQUENCE_PLANS))}",
            )
        )
    elif sequence_parallel and seq_len % tp:
        below = seq_len // tp * tp
        nearest = " or ".join(str(length) for length in (below, below + tp) if length)
        errors.append(
            ConfigError(
                "data.seq_len",
                seq_len,
                f"use {nearest}, or strategy.sequence_parallel=false",
                f"sequence parallelism cuts it over strategy.tp={tp}",
            )
        )
    return errors


def _limits(fields: Mapping[str, Any], model_type: str) -> Iterable[tuple[str, Callable[[int], bool]]]:
    """Each size that a tensor-parallel size has to fit, in words, and whether one does."""
    cut = {
        name.rsplit(".", 1)[-1]
        for name, style in brought_plan(model_type, "base_model_tp_plan").items()
        if STYLES[style] is not None
    }
    own = model_type in OWN_FAMILIES
    heads = _size(fields, "num_attention_heads")
    if heads and (own or "q_proj" in cut):
        yield f"it does not divide the {heads} attention heads", _divides(heads)
    key_value = _size(fields, "num_key_value_heads")
    if key_value and key_value != heads and "k_proj" in cut:
        yield (
            f"it neither divides the {key_value} key-value heads nor is divided by them",
            lambda size: key_value % size == 0 or size % key_value == 0,
        )
    for name, width in _widths(fields, cut, own):
        yield f"it does not divide the feed-forward width, {name}={width}", _divides(width)
    vocabulary = _size(fields, "vocab_size")
    if vocabulary:
        yield f"the vocabulary has {vocabulary} tokens", lambda size: size <= vocabulary


def _divides(whole: int) -> Callable[[int], bool]:
    return lambda size: whole % size == 0


def _widths(fields: Mapping[str, Any], cut: set[str], own: bool) -> Iterable[tuple[str, int]]:
    if own:
        width = _size(fields, "n_inner") or _size(fields, "intermediate_size")
        hidden = _size(fields, "hidden_size")
        if width:
            yield "n_inner" if _size(fields, "n_inner") else "intermediate_size", width
        elif "n_inner" in fields and hidden:
            yield "4 * hidden_size", 4 * hidden
        return
    expert_width = _size(fields, "moe_intermediate_size")
    if expert_width and "experts" in cut:
        yield "moe_intermediate_size", expert_width
    width = _size(fields, "intermediate_size")
    if width and (cut & {"gate_proj", "up_proj", "fc1", "gate_up_proj"}) and not (expert_width and "experts" in cut):
        yield "intermediate_size", width


def _size(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _largest(fields: Mapping[str, Any], tp: int) -> int:
    return max(tp, _size(fields, "num_attention_heads"))
