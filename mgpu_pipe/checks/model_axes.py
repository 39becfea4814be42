"""What the model axes (tp, pp, cp, ep) ask of model, batch and options. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mgpu_pipe.checks.context import context_parallel_errors
from mgpu_pipe.checks.experts import expert_parallel_errors
from mgpu_pipe.checks.pipeline import pipeline_errors
from mgpu_pipe.checks.tensor import tensor_parallel_errors
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import TEXT, part_type
from mgpu_pipe.parallel.pipeline_streams import SCHEDULES
from mgpu_pipe.topology import BatchPlan, ParallelDims


def model_axis_errors(
    config: RunConfig, dims: ParallelDims, plan: BatchPlan, fields: Mapping[str, Any]
) -> list[BadInputError]:
    """Everything that the sizes of the model axes do not fit, as errors.

    Args:
        fields: of the model's configuration (:func:`mgpu_pipe.models.fields.resolved_fields`).
    """
    strategy, model_type = config.strategy, str(fields.get("model_type"))
    errors: list[BadInputError] = list(_option_errors(config, dims))
    if not dims.uses_model_axes:
        return errors
    refused = refused_axes_errors(config, dims, description(config.objective.name).refused_axes)
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


def refused_axes_errors(config: RunConfig, dims: ParallelDims, axes: Iterable[str]) -> list[ConfigError]:
    """An error for each of these axes that is in use: the objective cannot be spread over it."""
    reason = f"objective.name={config.objective.name} cannot be spread over it"
    sizes = ((axis, getattr(dims, axis)) for axis in axes)
    return [ConfigError(f"strategy.{axis}", size, "use 1", reason) for axis, size in sizes if size > 1]


def _option_errors(config: RunConfig, dims: ParallelDims) -> list[ConfigError]:
    strategy, errors = config.strategy, list[ConfigError]()
    if strategy.sequence_parallel and dims.tp == 1:
        reason = "it splits activations over the tensor-parallel ranks"
        errors.append(ConfigError("strategy.sequence_parallel", True, "give strategy.tp, or use false", reason))
    schedule, precision = strategy.pipeline.schedule, resolve_precision(config)
    if dims.pp > 1 and SCHEDULES[schedule].splits_backward and precision == "fp8":
        fix = "use 1f1b or interleaved_1f1b, or precision=bf16"
        reason = "it splits the backward pass, which float8 products do not go with"
        errors.append(ConfigError("strategy.pipeline.schedule", schedule, fix, reason))
    if strategy.pipeline.layers and dims.pp == 1:
        fix = "give strategy.pp, or leave it out"
        errors.append(ConfigError("strategy.pipeline.layers", strategy.pipeline.layers, fix, "there is one stage"))
    if strategy.sequence_parallel and dims.cp * dims.tp > 1 and config.data.seq_len % (dims.cp * dims.tp):
        unit = dims.cp * dims.tp
        reason = "sequence parallelism splits what context parallelism leaves"
        errors.append(ConfigError("data.seq_len", config.data.seq_len, f"use a multiple of {unit}", reason))
    if strategy.offload != "none" and dims.uses_model_axes:
        reason = "offload works with the data-parallel strategies only"
        errors.append(ConfigError("strategy.offload", strategy.offload, "use none", reason))
    flash = config.model.attn_implementation == "flash_attention_2"
    if flash and dims.pp > 1:
        reason = "it lays a micro-batch's rows end to end, which a pipeline's stages do not expect"
        errors.append(ConfigError("model.attn_implementation", "flash_attention_2", "use auto or sdpa", reason))
    if flash and strategy.sequence_parallel and dims.ep > 1 and getattr(config.objective, "router_aux_loss", False):
        errors.append(
            ConfigError(
                "model.attn_implementation",
                "flash_attention_2",
                "use auto or sdpa",
                "it lays rows end to end, which the routers' balance loss cannot tell apart where "
                "sequence parallelism and expert parallelism share the ranks",
            )
        )
    return errors


def across_nodes(dims: ParallelDims, devices: int) -> list[tuple[str, str]]:
    """Axes that talk in every layer and whose ranks are not all on one node of ``devices``: key, and what is wrong."""
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
