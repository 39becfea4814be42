"""Checks that model, batch and options fit the model axes (tp, pp, cp, ep)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass, config_class
from mgpu_pipe.architectures.find import (
    STYLES,
    axes_of,
    families_with,
    family_of,
    has_tensor_plan,
    library_plan,
    tensor_if_errors,
)
from mgpu_pipe.architectures.formulas.flops import window_of
from mgpu_pipe.architectures.formulas.pipeline_schedules import splits_backward
from mgpu_pipe.checks.pipeline import pipeline_errors
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, PrecisionConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import TEXT, part_type
from mgpu_pipe.topology import BatchPlan, ParallelDims

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def context_parallel_errors(
    fields: Mapping[str, Any], model_type: str, cp: int, method: str, seq_len: int, tp: int = 1
) -> list[ConfigError]:
    """Errors that keep ``cp`` ranks from sharing sequences of ``seq_len`` tokens of this model.

    Args:
        fields: of the model's configuration, with standard names; see ``models.fields.resolved_fields``.
        method: ``ring`` or ``ulysses``.
        tp: ranks of tensor parallelism, which already share the heads.
    """
    if cp == 1:
        return []
    if not family_of(model_type).context:
        return [
            ConfigError(
                "strategy.cp",
                cp,
                f"use strategy.cp=1 (the axes for it are {axes_of(model_type)}), or a model of "
                f"{', '.join(families_with(lambda family: family.context))}",
                f"attention of the {model_type} family cannot run over several ranks",
            )
        ]
    own_names = (config_class(model_type) or ConfigClass()).attribute_map
    return [
        *_length_errors(seq_len, cp, method),
        *_head_errors(fields, cp, method, tp),
        *_attention_errors(fields, own_names, seq_len),
    ]


def _length_errors(seq_len: int, cp: int, method: str) -> Iterator[ConfigError]:
    parts, named = (2 * cp, "2 * strategy.cp") if method == "ring" else (cp, "strategy.cp")
    if seq_len % parts:
        below = seq_len // parts * parts
        nearest = " or ".join(str(length) for length in (below, below + parts) if length)
        yield ConfigError("data.seq_len", seq_len, f"use {nearest}", f"not a multiple of {named} = {parts}")


def _head_errors(fields: Mapping[str, Any], cp: int, method: str, tp: int) -> Iterator[ConfigError]:
    heads = fields.get("num_attention_heads")
    # tensor_parallel_errors reports heads that tp does not divide.
    if method != "ulysses" or not isinstance(heads, int) or heads % tp:
        return
    local = heads // tp
    if local % cp:
        fits = [size for size in range(1, local + 1) if local % size == 0]
        shared = f" / strategy.tp={tp}" if tp > 1 else ""
        reason = f"ulysses shares heads, and {heads} heads{shared} are not divisible by it"
        yield ConfigError("strategy.cp", cp, f"use one of {fits}, or strategy.context.method=ring", reason)


def _attention_errors(fields: Mapping[str, Any], own_names: Mapping[str, str], seq_len: int) -> Iterator[ConfigError]:
    def error(name: str, fix: str, reason: str) -> ConfigError:
        return ConfigError(f"model.config.{own_names.get(name, name)}", fields[name], fix, reason)

    window = window_of(fields)
    if window is not None and window < seq_len:
        fix = f"use at least data.seq_len={seq_len}, or strategy.cp=1"
        yield error("sliding_window", fix, "context parallelism knows no window shorter than the sequence")
    if fields.get("attn_logit_softcapping") is not None:
        fix = "set it to null, or use strategy.cp=1"
        yield error("attn_logit_softcapping", fix, "context parallelism does not cap attention scores")
    if fields.get("use_bidirectional_attention") not in (None, False):
        yield error("use_bidirectional_attention", "set it to false", "context parallelism is causal")
    for name in DROPOUTS:
        if fields.get(name):
            yield error(name, "set it to 0, or use strategy.cp=1", "context parallelism drops no attention out")


def expert_count(fields: Mapping[str, Any], model_type: str) -> int | None:
    """Number of experts in a layer, from the model's configuration; None for families without experts."""
    number = fields.get(family_of(model_type).experts)
    return number if isinstance(number, int) else None


def expert_parallel_errors(
    fields: Mapping[str, Any], model_type: str, ep: int, sizes: Sequence[int] | None = None
) -> list[ConfigError]:
    """Errors of ``strategy.ep`` for this model.

    Args:
        fields: of the model's configuration, see ``resolved_fields``.
        ep: the resolved size.
        sizes: the values of ``strategy.ep`` that the mesh allows; None if unknown.
    """
    if ep == 1:
        return []
    if not family_of(model_type).experts:
        others = ", ".join(families_with(lambda family: family.experts))
        reason = f"the {model_type} family has no experts that can be spread; those with: {others}"
        fix = f"use 1 (the axes for it are {axes_of(model_type)}), or a mixture of experts"
        return [ConfigError("strategy.ep", ep, fix, reason)]
    number = expert_count(fields, model_type)
    if number is None or number % ep == 0:
        return []
    fits = [size for size in range(1, number + 1) if number % size == 0 and (sizes is None or size in sizes)]
    named = f"model.config.{family_of(model_type).experts}"
    if not any(size > 1 for size in fits):
        fix = f"use 1, or a multiple of {ep} as {named}"
    else:
        fix = f"use {' or '.join(map(str, fits))}"
    return [ConfigError("strategy.ep", ep, fix, f"does not divide {named}={number}")]


def router_loss_errors(model_type: str, coefficient: float) -> list[ConfigError]:
    """Errors of ``objective.router_aux_loss`` for this model family."""
    key = "objective.router_aux_loss"
    if coefficient < 0:
        return [ConfigError(key, coefficient, "use 0 or more")]
    if coefficient == 0 or family_of(model_type).softmax_routers:
        return []
    others = ", ".join(families_with(lambda family: family.softmax_routers))
    if family_of(model_type).experts:
        reason = f"routers of the {model_type} family do not choose by softmax; those that do: "
        return [ConfigError(key, coefficient, "use 0", reason + others)]
    reason = f"the {model_type} family has no routers; those with: {others}"
    return [ConfigError(key, coefficient, "use 0, or a mixture of experts", reason)]


FEED_FORWARDS = ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "intermediate_size")
"""Names of the feed-forward width in families with a tensor plan in this package."""


def tensor_parallel_errors(
    fields: Mapping[str, Any], model_type: str, tp: int, sequence_parallel: bool, seq_len: int
) -> list[ConfigError]:
    """Errors that keep a model of resolved ``fields`` from being sharded over ``tp`` ranks."""
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
    """Yields each limit of the tensor-parallel size: the error's reason, and a function that tests a size."""
    cut = {
        name.rsplit(".", 1)[-1]
        for name, style in library_plan(model_type, "base_model_tp_plan").items()
        if STYLES.get(style) is not None
    }
    modules = family_of(model_type).modules
    has_plan = bool(modules)
    cut.update(child for children in modules.values() for child in children)
    fused = any(style in ("qkv", "grouped") for children in modules.values() for style in children.values())
    heads = _size(fields, "num_attention_heads")
    if heads and (has_plan or "q_proj" in cut):
        yield f"it does not divide the {heads} attention heads", _divides(heads)
    key_value = _size(fields, "num_key_value_heads") or _size(fields, "num_kv_heads")
    if key_value and fused:
        yield f"it does not divide the {key_value} key-value heads, fused with the queries", _divides(key_value)
    elif key_value and key_value != heads and "k_proj" in cut:
        yield (
            f"it neither divides the {key_value} key-value heads nor is divided by them",
            lambda size: key_value % size == 0 or size % key_value == 0,
        )
    for name, width in _widths(fields, cut, has_plan):
        yield f"it does not divide the feed-forward width, {name}={width}", _divides(width)
    vocabulary = _size(fields, "vocab_size")
    if vocabulary:
        yield f"the vocabulary has {vocabulary} tokens", lambda size: size <= vocabulary


def _divides(number: int) -> Callable[[int], bool]:
    return lambda size: number % size == 0


def _widths(fields: Mapping[str, Any], cut: set[str], has_plan: bool) -> Iterable[tuple[str, int]]:
    if has_plan:
        hidden = _size(fields, "hidden_size")
        names = [name for name in FEED_FORWARDS if _size(fields, name)]
        if names:
            dense = [name for name in ("intermediate_size_mlp",) if _size(fields, name)]  # Llama 4's, next to experts
            yield from ((name, _size(fields, name)) for name in (names[0], *dense))
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


def model_axis_errors(
    config: RunConfig, dims: ParallelDims, plan: BatchPlan, fields: Mapping[str, Any]
) -> list[BadInputError]:
    """Errors of the model axes' sizes, for a model of resolved ``fields``."""
    strategy, model_type = config.strategy, str(fields.get("model_type"))
    errors: list[BadInputError] = [
        *_fp8_errors(strategy, config.precision, config.trainer, dims),
        *_option_errors(strategy, config.data, dims),
        *_flash_errors(config.model, strategy, config.objective, dims),
    ]
    if not dims.uses_model_axes:
        return errors
    refused = refused_axes_errors(config.objective, dims, description(config.objective.name).refused_axes)
    if refused:
        return [*errors, *refused]
    if dims.tp > 1:
        errors += tensor_parallel_errors(fields, model_type, dims.tp, strategy.sequence_parallel, config.data.seq_len)
    errors += context_parallel_errors(
        fields, model_type, dims.cp, strategy.context.method, config.data.seq_len, dims.tp
    )
    span = dims.dp_shard * dims.tp
    sizes = [size for size in range(1, span + 1) if span % size == 0 and size % dims.tp == 0]
    errors += expert_parallel_errors(fields, model_type, dims.ep, [1, *sizes])
    language = fields.get(TEXT) if description(config.objective.name).samples == "picture_chats" else None
    errors += pipeline_errors(
        fields,
        part_type(model_type, TEXT, language) if isinstance(language, Mapping) else model_type,
        dims.pp,
        strategy.pipeline.schedule,
        plan.num_micro_batches,
        config.model.compile is True,
        strategy.pipeline.layers or None,
        strategy.pipeline.stages_per_rank,
        checkpointing=strategy.activation_checkpointing,
    )
    return errors


def refused_axes_errors(objective: ObjectiveConfig, dims: ParallelDims, axes: Iterable[str]) -> list[ConfigError]:
    """An error for each of these axes that is in use although the objective cannot be spread over it."""
    reason = f"objective.name={objective.name} cannot be spread over it"
    sizes = ((axis, getattr(dims, axis)) for axis in axes)
    return [ConfigError(f"strategy.{axis}", size, "use 1", reason) for axis, size in sizes if size > 1]


def _fp8_errors(
    strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig, dims: ParallelDims
) -> Iterator[ConfigError]:
    if dims.pp > 1 and splits_backward(strategy) and resolve_precision(precision, trainer) == "fp8":
        fix = "use 1f1b or interleaved_1f1b, or precision=bf16"
        reason = "it splits the backward pass, which float8 products do not go with"
        yield ConfigError("strategy.pipeline.schedule", strategy.pipeline.schedule, fix, reason)


def _option_errors(strategy: StrategyConfig, data: DataConfig, dims: ParallelDims) -> Iterator[ConfigError]:
    if strategy.sequence_parallel and dims.tp == 1:
        reason = "it splits activations over the tensor-parallel ranks"
        yield ConfigError("strategy.sequence_parallel", True, "give strategy.tp, or use false", reason)
    if strategy.pipeline.layers and dims.pp == 1:
        fix = "give strategy.pp, or leave it out"
        yield ConfigError("strategy.pipeline.layers", strategy.pipeline.layers, fix, "there is one stage")
    if strategy.sequence_parallel and dims.cp * dims.tp > 1 and data.seq_len % (dims.cp * dims.tp):
        unit = dims.cp * dims.tp
        reason = "sequence parallelism splits what context parallelism leaves"
        yield ConfigError("data.seq_len", data.seq_len, f"use a multiple of {unit}", reason)
    if strategy.offload != "none" and dims.uses_model_axes:
        reason = "offload works with the data-parallel strategies only"
        yield ConfigError("strategy.offload", strategy.offload, "use none", reason)


def _flash_errors(
    model: ModelConfig, strategy: StrategyConfig, objective: ObjectiveConfig, dims: ParallelDims
) -> Iterator[ConfigError]:
    key, value, fix = "model.attn_implementation", "flash_attention_2", "use auto or sdpa"
    if model.attn_implementation != value:
        return
    if dims.pp > 1:
        reason = "it lays a micro-batch's rows end to end, which a pipeline's stages do not expect"
        yield ConfigError(key, value, fix, reason)
    if strategy.sequence_parallel and dims.ep > 1 and getattr(objective, "router_aux_loss", False):
        reason = "it lays rows end to end, which the routers' balance loss cannot separate where "
        reason += "sequence parallelism and expert parallelism share the ranks"
        yield ConfigError(key, value, fix, reason)


def across_nodes(dims: ParallelDims, devices: int) -> list[tuple[str, str]]:
    """Key and problem of each axis that communicates in every layer and reaches across nodes of ``devices``."""
    axes = []
    # Ranks of tp follow one another; those of ep do too, with context-parallel ones in between.
    for axis, span in (("tp", dims.tp), ("ep", dims.ep * dims.cp)):
        size = getattr(dims, axis)
        if size > 1 and devices % span:
            product = "" if span == size else f" x cp={dims.cp}"
            axes.append(
                (
                    f"strategy.{axis}",
                    f"groups of {axis}={size}{product} reach across nodes of {devices} "
                    f"devices, and exchange activations in every layer; a divisor of {devices} stays inside",
                )
            )
    return axes
