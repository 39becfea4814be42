"""What the model axes (tp, pp, cp, ep) ask of model, batch and options; what ``check`` shows of them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.launch.pipeline_errors import pipeline_errors
from mgpu_pipe.launch.pipeline_picture import schedule_lines
from mgpu_pipe.models.context_checks import context_parallel_errors
from mgpu_pipe.models.experts import expert_parallel_errors, router_loss_errors
from mgpu_pipe.models.tensor_plans import tensor_parallel_errors
from mgpu_pipe.parallel.pipeline_balance import layer_costs, stage_contents, stage_layers
from mgpu_pipe.parallel.pipeline_streams import stages_by_rank
from mgpu_pipe.topology import BatchPlan, ParallelDims


def model_axis_errors(
    config: RunConfig, dims: ParallelDims, plan: BatchPlan, fields: Mapping[str, Any]
) -> list[BadInputError]:
    """Everything that the sizes of the model axes do not fit.

    Args:
        fields: of the model's configuration (:func:`mgpu_pipe.models.fields.resolved_fields`).
    """
    strategy, model_type = config.strategy, str(fields.get("model_type"))
    errors: list[BadInputError] = list(_option_errors(config, dims))
    errors += router_loss_errors(model_type, config.objective.router_aux_loss)
    if not dims.uses_model_axes:
        return errors
    if dims.tp > 1:
        errors += tensor_parallel_errors(fields, model_type, dims.tp, strategy.sequence_parallel, config.data.seq_len)
    errors += context_parallel_errors(
        fields, model_type, dims.cp, strategy.context.method, config.data.seq_len, dims.tp
    )
    errors += expert_parallel_errors(fields, model_type, dims.ep)
    errors += pipeline_errors(
        fields, model_type, dims.pp, strategy.pipeline.schedule, plan.num_micro_batches, config.model.compile,
        strategy.pipeline.layers or None,
    )  # fmt: skip
    return errors


def _option_errors(config: RunConfig, dims: ParallelDims) -> list[ConfigError]:
    strategy, errors = config.strategy, list[ConfigError]()
    if strategy.sequence_parallel and dims.tp == 1:
        errors.append(ConfigError("strategy.sequence_parallel", True, "give strategy.tp, or use false",
                                  "it splits activations over the tensor-parallel ranks"))
    if strategy.pipeline.layers and dims.pp == 1:
        errors.append(ConfigError("strategy.pipeline.layers", strategy.pipeline.layers, "give strategy.pp, or leave it "
                                  "out", "there is one stage"))
    if strategy.sequence_parallel and dims.cp * dims.tp > 1 and config.data.seq_len % (dims.cp * dims.tp):
        unit = dims.cp * dims.tp
        errors.append(ConfigError("data.seq_len", config.data.seq_len, f"use a multiple of {unit}",
                                  "sequence parallelism splits what context parallelism leaves"))
    if strategy.offload != "none" and dims.uses_model_axes:
        errors.append(ConfigError("strategy.offload", strategy.offload, "use none",
                                  "offload works with the data-parallel strategies only"))
    if config.precision.name == "fp8" and dims.tp > 1:
        errors.append(ConfigError("precision.name", "fp8", "use bf16, or strategy.tp=1",
                                  "tensor parallelism has no float8 products"))
    if config.model.compile and dims.uses_model_axes:
        errors.append(ConfigError("model.compile", True, "use false",
                                  "compiled blocks are not known to work with tp, pp, cp or ep"))
    return errors


def pipeline_rows(config: RunConfig, dims: ParallelDims, plan: BatchPlan, fields: Mapping[str, Any]) -> list[str]:
    """The schedule as a picture, its bubble, and what each stage holds; none without a pipeline."""
    if dims.pp == 1:
        return []
    chosen = config.strategy.pipeline
    held = stages_by_rank(chosen.schedule, dims.pp)
    costs = layer_costs(fields, config.data.seq_len)
    layers = stage_layers(costs, sum(map(len, held)), chosen.layers or None)
    ranks = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    contents = stage_contents(costs, layers, [ranks[stage] for stage in range(len(layers))])
    return schedule_lines(chosen.schedule, dims.pp, plan.num_micro_batches, contents)
