"""Memory of a run's worst rank, from its configuration, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_pipe.architectures.family import PARTS
from mgpu_pipe.architectures.formulas.kept_memory import FP32, HALF, chunk_rows, optimizer_bytes, sharded_stage
from mgpu_pipe.architectures.formulas.parameters import (
    dense_parameters,
    embedding_parameters,
    experts_of,
    final_norm_parameters,
    has_exact_sizes,
    head_parameters,
    layer_counts,
    layer_norm_parameters,
    sizes_of,
)
from mgpu_pipe.architectures.formulas.pipeline_schedules import SCHEDULES, layer_costs, stage_layers, stages_by_rank
from mgpu_pipe.config.group_keys import OptimizerConfig, StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import DataConfig, ModelConfig, PrecisionConfig, RunConfig, TrainerConfig
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.planning.activation_bytes import Activations
from mgpu_pipe.planning.layout_costs import passes_in_flight, waiting_passes
from mgpu_pipe.planning.memory_terms import MOVING, OUTSIDE, Overheads, Place, State, host_bytes, memory_terms
from mgpu_pipe.planning.model_work import NEEDED, compiles_blocks, run_work, stages_per_rank
from mgpu_pipe.planning.other_models import (
    adapter_parameters,
    four_bits,
    other_bytes,
    tower_parameters,
    trained_apart,
    uncut_parameters,
)
from mgpu_pipe.topology import AXES, BatchPlan, ParallelDims

MIB = 1 << 20
MANY = 1 << 40
"""More tokens than any micro-batch has."""
DECODERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
"""Classes of models with a decoder, whose objectives have a loss over its vocabulary."""
MAX_LAYERS = 10_000
"""Layers are counted one by one; no model that can be trained has as many."""
KNOWN_OPTIMIZERS = ("Adam", "AdamW", "AdamWBf16")
"""Classes whose state is counted exactly."""
DEQUANTISED = 6.125
"""Bytes of a weight in :func:`mgpu_pipe.models.adapters.qlora.dequantise`: fp32, next to it its codes or the compute
type, and 2 of the 64th part of fp32 scales."""
UNKNOWN_FAMILY = 0.3
"""Uncertainty of the state of a family whose parameters are estimated."""
SPREADS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(MOVING, (0.85, 1.2)),
    "activations of the tower": (0.0, 2.0),  # no pictures, or nothing else
    "second gradients": (0.0, 1.0),
    "communication": (0.5, 2.0),
    "context": (0.6, 2.0),
    "fragmentation": (0.0, 3.0),
    "other models": (0.8, 1.3),
}
"""Low and high figure of a term over its likely one; terms that are not here are exact."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of the rank that needs most.

    Attributes:
        rank: its place in the pipeline.
        terms: likely bytes by term.
        low: bytes that it needs at least.
        mean_low: mean of the low figures over pipeline ranks.
        high: bytes that it hardly exceeds.
        host: bytes of its state in host memory.
        assumes: what was assumed, in words; empty where the model's shapes are known.
    """

    rank: int
    terms: Mapping[str, int]
    low: int
    mean_low: int
    high: int
    host: int = 0
    assumes: str = ""

    @property
    def likely(self) -> int:
        return sum(self.terms.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors alone, which torch counts as allocated."""
        return sum(size for name, size in self.terms.items() if name not in OUTSIDE)


def memory_by_rank(config: RunConfig, overheads: Overheads | None = None) -> MemoryPlan | None:
    """Memory of a run's worst rank; None for a model or an objective whose shapes are not known.

    Raises:
        ConfigError: a world or a batch that its strategy does not allow.
    """
    fields = resolved_fields(config.model)
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    known = all(isinstance(fields.get(name), int) for name in NEEDED)
    decodes = description(config.objective.name).model_class in DECODERS
    if not known or fields["num_hidden_layers"] > MAX_LAYERS or not config.data.tokens() or not decodes:
        return None
    work = run_work(config, fields)
    state, keeps = state_of(config, fields, dims), activations_of(config, fields, dims)
    by_rank = [
        {
            name: float(size)
            for name, size in memory_terms(work, state, keeps, place, overheads or overheads_of(config.trainer)).items()
        }
        for place in _places(config.data, config.strategy, fields, dims, plan)
    ]
    worst = max(range(dims.pp), key=lambda rank: sum(by_rank[rank].values()))
    likely = by_rank[worst]
    spread = 0.0 if has_exact_sizes(fields) else UNKNOWN_FAMILY
    bounds = {name: SPREADS.get(name, (1 - spread, 1 + spread)) for name in likely}
    bounds.update({name: (0.0, bounds[name][1]) for name in _uncertain_terms(config.model, config.optimizer)})
    lows = [sum(size * bounds[name][0] for name, size in terms.items()) for terms in by_rank]
    low, mean_low = lows[worst], sum(lows) / len(lows)
    high = sum(size * bounds[name][1] for name, size in likely.items())
    assumes = "" if has_exact_sizes(fields) else f"{fields.get('model_type')}: the usual layer with its fields"
    terms_of_rank = {name: round(size) for name, size in likely.items() if size}
    host = round(float(host_bytes(work, state, Place(fields["num_hidden_layers"]))))
    return MemoryPlan(worst, terms_of_rank, int(low), int(mean_low), int(high), host, assumes)


def _uncertain_terms(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[str, ...]:
    """Terms that may be far smaller than predicted: by optimizers and patterns of frozen parts that are not counted."""
    if set(model.freeze) - {*PARTS, "*"}:
        return ("optimizer", "gradients", "second gradients", "gradients under way")
    known = optimizer._target_.rpartition(".")[2] in KNOWN_OPTIMIZERS
    return () if known else ("optimizer",)


def overheads_of(trainer: TrainerConfig) -> Overheads:
    """Memory of a run's processes besides its tensors, on GPUs or on the CPU."""
    return Overheads() if device_type(trainer) == "cuda" else Overheads(group=0.0, second_gradients=0.0)


def _places(
    data: DataConfig, strategy: StrategyConfig, fields: Mapping[str, Any], dims: ParallelDims, plan: BatchPlan
) -> list[Place]:
    """Every pipeline rank's place."""
    if dims.pp == 1:
        return [Place(fields["num_hidden_layers"])]
    chosen, each = strategy.pipeline, stages_per_rank(strategy)
    cuts = stage_layers(layer_costs(fields, data.seq_len), dims.pp * each, chosen.layers or None)
    last, places = dims.pp * each - 1, []
    for rank, stages in enumerate(stages_by_rank(chosen.schedule, dims.pp, each)):
        passes = passes_in_flight(chosen.schedule, rank, dims.pp, each, plan.num_micro_batches)
        layers = sum(len(cuts[stage]) for stage in stages)
        waiting = waiting_passes(chosen.schedule, float(rank), dims.pp)
        places.append(Place(layers, passes, float(0 in stages), float(last in stages), waiting))
    return places


def activations_of(config: RunConfig, fields: Mapping[str, Any], dims: ParallelDims) -> Activations:
    """How a run keeps activations.

    Args:
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`.
    """
    precision, device = resolve_precision(config.precision, config.trainer), device_type(config.trainer)
    item = FP32 if precision == "fp32" else HALF
    chunk, shard = getattr(config.objective, "loss_chunk_tokens", "auto"), -(-fields["vocab_size"] // dims.tp)
    rows = chunk_rows(chunk, shard, MANY, item if device == "cuda" else None)
    mode = config.strategy.activation_checkpointing
    return Activations(
        item=item,
        compiled=float(compiles_blocks(config.model, config.strategy, config.precision, device, fields)),
        copies=float(device == "cpu"),
        frozen_norms=float(config.peft.name != "none"),
        recompute=float(mode != "none"),
        products=float(mode == "selective"),
        logit_rows=0 if chunk == 0 and dims.tp == 1 else rows,
    )


def state_of(config: RunConfig, fields: Mapping[str, Any], dims: ParallelDims) -> State:
    """The parameters of a run's model and how its ranks keep them.

    Args:
        fields: see :func:`mgpu_pipe.models.fields.resolved_fields`.
    """
    strategy, precision, peft = config.strategy, resolve_precision(config.precision, config.trainer), config.peft
    layers = [layer.total for layer in layer_counts(fields)]
    block = sum(layers) / max(1, len(layers))
    final_norm = final_norm_parameters(fields)
    by_one_rank = dims.pp == 1 or SCHEDULES[strategy.pipeline.schedule].v_shaped
    shares_table = bool(fields.get("tie_word_embeddings")) and by_one_rank
    table, towers = embedding_parameters(fields), tower_parameters(fields)
    uncut = uncut_parameters(fields, strategy.parts.whole)
    shards, adapts = dims.dp_shard * dims.cp, peft.name != "none"
    item = FP32 if precision == "fp32" else HALF
    by_fsdp = shards > 1 or dims.uses_model_axes or precision != "fp32" or strategy.offload != "none"
    is_zero = strategy.engine == "deepspeed"
    if is_zero:
        storage = _zero_storage(config.optimizer, strategy, precision, item)
    else:
        storage = _mesh_storage(config.optimizer, config.precision, precision, strategy, dims, item * by_fsdp)
    trained = float(not adapts and not {"language", "*"} & set(config.model.freeze))
    four = four_bits(peft)
    return State(
        block=block,
        embedding=table + sum(towers.values()) + final_norm * shares_table,
        uncut=sum(uncut.values()),
        head=0.0 if shares_table else head_parameters(fields) + final_norm,
        experts=max(layers) - min(dense_parameters(fields), max(layers)) if experts_of(fields) else 0.0,
        norms=layer_norm_parameters(fields),
        head_trains=trained,
        block_weight=four or storage["weight"],
        block_copy=four * by_fsdp if four else storage["copy"],
        dequantised=DEQUANTISED * _largest_matrix(fields) if four else 0.0,
        trained=trained,
        trained_apart=trained_apart(towers, config.model.freeze, peft),
        uncut_apart=trained_apart(uncut, config.model.freeze, peft),
        added=adapter_parameters(config.peft, fields) if adapts else 0.0,
        units=1 + strategy.fsdp.prefetch if device_type(config.trainer) == "cuda" else 1,
        other=other_bytes(config.objective, item, shards),
        offloads=float(strategy.offload != "none"),
        on_disk=float(strategy.offload == "nvme"),
        groups=sum(getattr(dims, axis) > 1 for axis in (*AXES, "ep")) + (dims.world_size > 1),
        **storage,
    )


def _mesh_storage(
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    computes: str,
    strategy: StrategyConfig,
    dims: ParallelDims,
    copy: float,
) -> dict[str, float]:
    """Fields of :class:`State` of DDP and FSDP2; ``copy`` is the bytes of a weight's copy in the compute type."""
    is_half = computes == "bf16_true"
    whole = dims.pp > 1 or dims.dp_shard * dims.cp == 1
    # Whole gradients are summed up in the type of their reduction.
    reduces_half = precision.reduce == "bf16" or (is_half and not whole)
    # One process keeps its copy of the weights, unless it is in their own type.
    keeps_gathered = whole and not (is_half and dims.pp == 1)
    return {
        "weight": HALF if is_half else FP32,
        "copy": copy,
        "gradient": HALF if reduces_half else FP32,
        "optimizer": optimizer_bytes(optimizer) // (2 if is_half else 1),
        "gathers_units": float(not keeps_gathered and strategy.fsdp.reshard_after_forward is not False),
        "sums_whole": float(whole),
    }


def _zero_storage(optimizer: OptimizerConfig, strategy: StrategyConfig, computes: str, item: float) -> dict[str, float]:
    """Fields of :class:`State` of DeepSpeed; ``item`` is the bytes of a number in the compute type."""
    stage = sharded_stage(strategy)
    weight, master = (FP32, 0) if computes == "fp32" else (HALF, FP32)
    return {
        "weight": weight,
        "copy": item * (stage > 2),
        "gradient": FP32,
        "optimizer": optimizer_bytes(optimizer) // (2 if computes == "bf16_true" else 1) + master,
        # ZeRO-2 reduces in the compute type, the others in fp32.
        "buckets": strategy.bucket_mib * MIB * (item / FP32 if stage == 2 else 1),
    }


def _largest_matrix(fields: Mapping[str, Any]) -> int:
    """Parameters of the largest matrix of a block."""
    inner = fields.get(sizes_of(fields).inner) or 4 * fields["hidden_size"]
    return int(fields["hidden_size"] * inner)
