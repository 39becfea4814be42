"""Shapes of a causal language model as :class:`mgpu_pipe.planning.work.Work`, from its configuration's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mgpu_pipe.architectures.formulas.flops import Shape, mean_context
from mgpu_pipe.architectures.formulas.kept_memory import sharded_stage
from mgpu_pipe.architectures.formulas.parameters import (
    embedding_parameters,
    experts_of,
    experts_per_token,
    head_parameters,
    latent_parameters,
    layer_counts,
    shared_width,
    sizes_of,
)
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, splits_backward
from mgpu_pipe.architectures.formulas.towers import vision_shape
from mgpu_pipe.config.group_keys import PeftConfig, StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import device_type, prefers_compiled, resolve_precision
from mgpu_pipe.config.schema import ModelConfig, ObjectiveConfig, PrecisionConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.other_models import adapted_share, four_bits, other_passes
from mgpu_pipe.planning.work import Work
from mgpu_pipe.topology import AXES, BatchPlan, ParallelDims

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields without which nothing can be said."""
DEQUANTISED_BYTES = {False: 22.5, True: 2.5}
"""Bytes per four-bit weight that :func:`mgpu_pipe.models.adapters.qlora.dequantise` reads and writes, by whether one
compiled kernel does it: two codes of a byte to integers (2.5), levels in fp32 (6), times the scale (8), rounded (6)."""
CAST_BYTES = 10.0
"""FSDP2 on one process rounds fp32 weights (6 bytes) and copies the result (4)."""
PICTURE_SHARE = 0.5
"""Share of a row's tokens that are places of pictures, which only the data says."""
ADAPTERS = 0.01
"""Share of the parameters that adapters are taken to be."""


def model_work(config: RunConfig, fields: Mapping[str, Any]) -> Work:
    """The model, the rows and the precision of a run on one process; ConfigError for unknown shapes, or no tokens."""
    missing = [name for name in NEEDED if not isinstance(fields.get(name), int)]
    if missing or not config.data.tokens():
        reason = f"its {missing[0]} is unknown" if missing else "its samples are not of tokens"
        fix = "plan a language model, of model.type or model.path"
        raise ConfigError("model.type", config.model.type or fields.get("model_type"), fix, reason)
    shape, sizes, experts = Shape.from_fields(fields), sizes_of(fields), experts_of(fields)
    inner = fields.get(sizes.expert_width if experts else sizes.inner)
    precision, tokens = resolve_precision(config.precision, config.trainer), config.data.tokens()
    adapts = config.peft.name != "none"
    entry = 4.0 if precision == "fp32" else 2.0
    device = device_type(config.trainer)
    is_compiled = compiles_blocks(config.model, config.strategy, config.precision, device, fields)
    return Work(
        layers=float(shape.layers),
        width=float(shape.width),
        inner=float(inner or 4 * shape.width),
        heads=float(shape.heads),
        key_value_heads=float(shape.key_value_heads),
        head_dim=float(shape.head_dim),
        vocabulary=float(fields["vocab_size"]),
        sequence=float(tokens),
        context=mean_context(float(tokens), fields),
        gated=float(sizes.gated),
        experts=float(experts),
        chosen=float(experts_per_token(fields)) if experts else 1.0,
        shared=shared_width(fields) / inner if experts and inner else 0.0,
        attention_weights=float(latent_parameters(fields)),
        tied=float(bool(fields.get("tie_word_embeddings"))),
        flash=float(config.model.attn_implementation != "eager"),
        weight_bytes=four_bits(config.peft) or entry,
        activation_bytes=entry,
        gradient_bytes=2.0 if config.precision.reduce == "bf16" else 4.0,
        float8=float(precision == "fp8"),
        other_passes=other_passes(config.objective, fields),
        trained=ADAPTERS if adapts else 1.0,
        adapter_rank=float(config.peft.r) if adapts else 0.0,
        adapted=adapted_share(config.peft.targets, fields) if adapts else 1.0,
        eager=runs_eager(config.model, config.strategy, config.precision, device, fields),
        dequantised_bytes=DEQUANTISED_BYTES[is_compiled] if config.peft.name == "qlora" else 0.0,
        cast_bytes=CAST_BYTES if precision in ("bf16", "fp16", "fp8") and config.strategy.engine == "mesh" else 0.0,
        **_tower(config.model, config.objective, config.peft, fields, tokens),
    )


def _tower(
    model: ModelConfig, objective: ObjectiveConfig, peft: PeftConfig, fields: Mapping[str, Any], tokens: int
) -> dict[str, float]:
    """Fields of :class:`Work` for the vision tower; none where no pictures are shown. Pictures are taken to fill
    :data:`PICTURE_SHARE` of a row."""
    shape = vision_shape(fields)
    if shape is None or description(objective.name).samples != "picture_chats":
        return {}
    patches, frozen = PICTURE_SHARE * tokens * shape.patches_of_place, {"vision", "*"} & set(model.freeze)
    return {
        "tower_layers": float(shape.layers),
        "tower_width": float(shape.width),
        "tower_inner": float(shape.inner),
        "tower_heads": float(shape.heads),
        "tower_gated": float(shape.is_gated),
        "patches": patches,
        "patches_in_view": min(patches, shape.patches or patches),
        "tower_trains": float(not frozen if peft.name == "none" else "vision" in peft.train_also),
    }


def run_work(config: RunConfig, fields: Mapping[str, Any]) -> Work:
    """The work of a step of a run on its processes.

    Args:
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`.

    Raises:
        ConfigError: see :func:`model_work`, or a world or a batch that the strategy does not allow.
    """
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    mode = config.strategy.activation_checkpointing
    return replace(
        model_work(config, fields),
        **{axis: float(getattr(dims, axis)) for axis in (*AXES, "ep")},
        schedule=float(tuple(SCHEDULES).index(config.strategy.pipeline.schedule)),
        stages_per_rank=float(stages_per_rank(config.strategy)),
        rows=float(plan.micro_batch_size),
        micro_batches=float(plan.num_micro_batches),
        zero=float(sharded_stage(config.strategy)),
        **place_of_state(config.strategy, resolve_precision(config.precision, config.trainer)),
        sequence_parallel=float(config.strategy.sequence_parallel),
        ulysses=float(config.strategy.context.method == "ulysses"),
        recompute_products=float(mode == "full"),
        recompute_attention=float(mode == "full"),
        recompute_elementwise=float(mode != "none"),
    )


def compiles_blocks(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, device: str, fields: Mapping[str, Any]
) -> bool:
    """Whether a run compiles its blocks on ``cpu`` or ``cuda``; takes the toolchain of ``auto`` for granted."""
    blocks = sum(layer.total for layer in layer_counts(fields))
    parameters = blocks + embedding_parameters(fields) + head_parameters(fields)
    wanted = prefers_compiled(model, strategy, precision, device, parameters)
    return wanted and (model.compile is True or not splits_backward(strategy))


def runs_eager(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, device: str, fields: Mapping[str, Any]
) -> float:
    """1 if a GPU runs the blocks neither compiled nor by Liger's kernels; see :func:`compiles_blocks`."""
    if device != "cuda" or model.kernels == "liger":
        return 0.0
    return float(not compiles_blocks(model, strategy, precision, device, fields))


def place_of_state(strategy: StrategyConfig, precision: str) -> dict[str, float]:
    """Fields of :class:`Work` that say where a strategy keeps a rank's state, and whether it hides its collectives."""
    is_zero = strategy.engine == "deepspeed"
    halves = is_zero and precision != "fp32"
    return {
        "overlaps": float(not is_zero),
        "offloads": float(strategy.offload != "none"),
        "on_disk": float(strategy.offload == "nvme"),
        "host_weight_bytes": 2.0 if halves or precision == "bf16_true" else 4.0,
    }


def stages_per_rank(strategy: StrategyConfig) -> int:
    """Pipeline stages of a rank; what ``auto`` means under the schedule."""
    chosen = strategy.pipeline
    least = SCHEDULES[chosen.schedule].stages_per_rank
    return least if chosen.stages_per_rank == "auto" or strategy.pp == 1 else chosen.stages_per_rank
