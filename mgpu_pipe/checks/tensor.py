"""The sizes that tensor parallelism takes of each family. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.brought import STYLES, brought_plan
from mgpu_pipe.families.find import axes_of, families_with, family_of, has_tensor_plan, tensor_if_errors

FEED_FORWARDS = ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "intermediate_size")
"""Names of the feed-forward width in families whose files say how they are cut."""


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
        reason = f"the {model_type} family has no plan for tensor parallelism"
        return [ConfigError("strategy.tp", tp, f"use strategy.tp=1; the axes for it are {axes_of(model_type)}", reason)]
    refused = tensor_if_errors(fields, model_type, tp)
    if refused:
        return refused
    limits = list(_limits(fields, model_type))
    fits = [size for size in range(1, _largest(fields, tp) + 1) if all(fit(size) for _, fit in limits)]
    errors = [ConfigError("strategy.tp", tp, f"use one of {fits}", what) for what, fit in limits if not fit(tp)]
    if sequence_parallel and family_of(model_type).sequence is None:
        errors.append(
            ConfigError(
                "strategy.sequence_parallel",
                True,
                "use strategy.sequence_parallel=false",
                f"the {model_type} family has no plan for it; these have: "
                + ", ".join(families_with(lambda family: family.sequence)),
            )
        )
    elif sequence_parallel and seq_len % tp:
        below = seq_len // tp * tp
        nearest = " or ".join(str(length) for length in (below, below + tp) if length)
        fix = f"use {nearest}, or strategy.sequence_parallel=false"
        errors.append(ConfigError("data.seq_len", seq_len, fix, f"sequence parallelism cuts it over strategy.tp={tp}"))
    return errors


def _limits(fields: Mapping[str, Any], model_type: str) -> Iterable[tuple[str, Callable[[int], bool]]]:
    """Each size that a tensor-parallel size has to fit, in words, and whether one does."""
    cut = {
        name.rsplit(".", 1)[-1]
        for name, style in brought_plan(model_type, "base_model_tp_plan").items()
        if STYLES.get(style) is not None
    }
    modules = family_of(model_type).modules
    own = bool(modules)
    cut.update(child for children in modules.values() for child in children)
    fused = any(style in ("qkv", "grouped") for children in modules.values() for style in children.values())
    heads = _size(fields, "num_attention_heads")
    if heads and (own or "q_proj" in cut):
        yield f"it does not divide the {heads} attention heads", _divides(heads)
    key_value = _size(fields, "num_key_value_heads") or _size(fields, "num_kv_heads")
    if key_value and fused:
        yield f"it does not divide the {key_value} key-value heads, fused with the queries", _divides(key_value)
    elif key_value and key_value != heads and "k_proj" in cut:
        yield (
            f"it neither divides the {key_value} key-value heads nor is divided by them",
            lambda size: key_value % size == 0 or size % key_value == 0,
        )
    for name, width in _widths(fields, cut, own):
        yield f"it does not divide the feed-forward width, {name}={width}", _divides(width)
    vocabulary = _size(fields, "vocab_size")
    if vocabulary:
        yield f"the vocabulary has {vocabulary} tokens", lambda size: size <= vocabulary


def _divides(number: int) -> Callable[[int], bool]:
    return lambda size: number % size == 0


def _widths(fields: Mapping[str, Any], cut: set[str], own: bool) -> Iterable[tuple[str, int]]:
    if own:
        hidden = _size(fields, "hidden_size")
        given = [name for name in FEED_FORWARDS if _size(fields, name)]
        if given:
            yield given[0], _size(fields, given[0])
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
