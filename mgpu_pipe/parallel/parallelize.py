"""The order in which a model is parallelised. :func:`parallelize` reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from mgpu_pipe.models.kernels.norms import add_up_in_fp32
from mgpu_pipe.models.local_shards import cast_parameters
from mgpu_pipe.models.model_parts import tower_names
from mgpu_pipe.models.stage_placeholders import is_removed
from mgpu_pipe.parallel.checkpointing import Mode, TowerMode, apply_activation_checkpointing
from mgpu_pipe.parallel.compile import compile_blocks, use_float8
from mgpu_pipe.parallel.context.attention import Method, apply_context_parallel, in_sequences
from mgpu_pipe.parallel.expert.experts import ExpertLoad, apply_expert_parallel, experts_modules
from mgpu_pipe.parallel.fsdp import COMPUTE_DTYPES, ShardingOptions, apply_fully_shard
from mgpu_pipe.parallel.pipeline.run_pipeline import MicroBatch, Pipeline, PipelinePlan, StageObjective
from mgpu_pipe.parallel.pipeline.stages import StageView
from mgpu_pipe.parallel.random_streams import RankStreams, uses_dropout
from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel
from mgpu_pipe.parallel.tensor.whole_towers import keep_towers_whole
from mgpu_pipe.system.compat.torch_private import find_fsdp_units
from mgpu_pipe.topology import Meshes, ParallelDims

Fill = Callable[[Any, torch.device], object]


@dataclass(frozen=True)
class ParallelOptions:
    """Options of a parallelised model, beyond the sizes of the axes.

    Attributes:
        precision: ``fp32``, ``bf16``, ``bf16_true``, ``fp16`` or ``fp8``.
        fp8_recipe: torchao's name of the scaling recipe of ``fp8``.
        bucket_mib: size of a gradient bucket of plain data parallelism.
        sharding: options of FSDP2.
        pipeline: where each stage is; needed where ``pp`` is above 1.
        whole_parts: parts of the model that tensor parallelism keeps whole; its ranks share their pictures.
    """

    precision: str = "fp32"
    fp8_recipe: str = "tensorwise"
    bucket_mib: float = 25.0
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    activation_checkpointing: Mode = "none"
    compile_model: bool = False
    sequence_parallel: bool = False
    pipeline: PipelinePlan | None = None
    context_method: Method = "ring"
    whole_parts: tuple[str, ...] = ()
    tower_checkpointing: TowerMode = "same"


class ParallelObjective(StageObjective, Protocol):
    """The objective whose model is parallelised."""

    model: Any


@runtime_checkable
class SequenceSharer(Protocol):
    """Objective that reduces numbers of a sequence over the ranks that hold its tokens."""

    def share_sequences(self, groups: Sequence[dist.ProcessGroup], along: dist.ProcessGroup | None) -> None:
        """Called once before training with the groups of ranks that hold other tokens of the same sequences."""


@runtime_checkable
class StageLoss(Protocol):
    """Objective with an auxiliary loss in each pipeline stage."""

    def stage_output(self, batch: MicroBatch, scale: float, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``compute()`` of a stage before the last, perhaps with an auxiliary loss times the loss ``scale``."""


@dataclass
class ParallelParts:
    """The parts of a parallelised model that its steps use.

    Attributes:
        groups: this rank's group of each of the axes ``pp``, ``cp`` and ``tp`` that has several ranks.
        streams: random streams of dropout, where tensor-parallel ranks hold some activations whole and others in parts.
        pipeline: this rank's stages, where there are several.
        sharded: the root module of FSDP2, where it shards.
        num_experts: experts of each layer of the whole model; 0 for a dense model.
        expert_load: counts the tokens of this rank's experts.
        stage_group: ranks of this rank's pipeline stage, over which token counts are summed.
    """

    groups: dict[str, dist.ProcessGroup]
    streams: RankStreams | None = None
    pipeline: Pipeline | None = None
    sharded: FSDPModule | None = None
    num_experts: int = 0
    expert_load: ExpertLoad | None = None
    stage_group: dist.ProcessGroup | None = None


def parallelize(
    objective: ParallelObjective,
    meshes: Meshes,
    dims: ParallelDims,
    device: torch.device,
    options: ParallelOptions,
    fill: Fill | None,
    after_weights: Callable[[], None],
) -> ParallelParts:
    """Parallelise the model of ``objective`` in place on this rank. A collective call.

    Args:
        meshes: the groups of ranks that this rank is in.
        device: this process's device.
        fill: fills parameters and buffers of a model on the meta device, each rank its own parts; None for a model
            that holds its weights.
        after_weights: called when a pipeline has computed gradients of weights apart from those of inputs.
    """
    model = objective.model
    groups = {axis: meshes.group(axis) for axis in ("pp", "cp", "tp") if getattr(dims, axis) > 1}
    parts = ParallelParts(groups, num_experts=ExpertLoad.experts_of(model))  # a pipeline stage may have no experts

    # Precision of the parameters and of the blocks' matrix products.
    if options.precision == "bf16_true":
        cast_parameters(model, torch.bfloat16)
    elif options.precision == "fp8":
        use_float8(model, options.fp8_recipe, dims.tp)

    towers, random = tower_names(model, options.whole_parts), uses_dropout(model)

    # Pipeline: delete the layers of other ranks' stages.
    views = options.pipeline.cut(model, groups["pp"].rank()) if options.pipeline is not None and dims.pp > 1 else []

    # Tensor parallelism, and with it sequence parallelism: cut the parameters of each layer.
    tensor = groups.get("tp")
    if tensor is not None:
        parts.streams = RankStreams(model, device) if random else None
        _cut_layers(model, tensor, dims, options, views, towers, parts.streams)

    # Expert parallelism: keep this rank's experts.
    experts = _keep_experts(model, meshes, tensor, options, parts.streams) if dims.ep > 1 else []

    # Context parallelism: attention over the sequence parts of several ranks.
    if dims.cp > 1:
        apply_context_parallel(model, groups["cp"], options.context_method, objective.batch_spec)
    if dims.uses_model_axes and isinstance(objective, SequenceSharer):
        # A router sees a part of the sequence; all of it where its experts are cut over the same ranks.
        along = tensor if options.sequence_parallel and dims.ep > 1 else None
        objective.share_sequences([groups["cp"]] if dims.cp > 1 else [], along)
    if views and options.pipeline is not None:
        parts.pipeline = _build_pipeline(
            objective, options, options.pipeline, views, groups["pp"], device, after_weights
        )

    # Token counts of the experts.
    if parts.num_experts:
        if dims.world_size > dims.pp:
            parts.stage_group = meshes.group("stage")
        if experts_modules(model):
            parts.expert_load = ExpertLoad(model, device)

    # Recomputation, then compilation, of the repeated blocks.
    add_up_in_fp32(model)
    apply_activation_checkpointing(model, options.activation_checkpointing, options.tower_checkpointing)
    if options.compile_model:
        compile_blocks(model)

    # FSDP2 over the data-parallel axes, also for mixed precision and offload. Frozen parts have nothing to reduce.
    reduces = dims.uses_model_axes and any(parameter.requires_grad for parameter in model.parameters())
    if dims.dp_shard > 1 or reduces or options.precision != "fp32" or options.sharding.offload:
        parts.sharded = _shard(model, meshes, dims, options, experts)

    # Fill the parameters, each rank its own parts.
    if fill is not None:
        fill(model, torch.device("cpu") if options.sharding.offload else device)
    if parts.sharded is not None and options.sharding.offload:
        _move_buffers(model, device)
    if parts.sharded is not None and parts.pipeline is not None:
        find_fsdp_units(parts.sharded)
    return parts


def _cut_layers(
    model: torch.nn.Module,
    group: dist.ProcessGroup,
    dims: ParallelDims,
    options: ParallelOptions,
    views: Sequence[StageView],
    towers: Mapping[str, str],
    streams: RankStreams | None,
) -> None:
    """Cut the layers of this rank's stages over ``group``; ``towers``, names of modules by their parts, stay whole."""
    # Only the first pipeline stage has towers.
    here = {part: name for part, name in towers.items() if not is_removed(model.get_submodule(name))}
    apply_tensor_parallel(
        model,
        group,
        sequence_parallel=options.sequence_parallel,
        experts=dims.ep == 1,
        stages=[view.layers for view in views],
        streams=streams,
        whole=list(here.values()),
    )
    keep_towers_whole(model, here, group, streams)


def _keep_experts(
    model: torch.nn.Module,
    meshes: Meshes,
    tensor: dist.ProcessGroup | None,
    options: ParallelOptions,
    streams: RankStreams | None,
) -> list[torch.nn.Module]:
    """The modules of experts, of which this rank keeps its part; none in a pipeline stage without experts."""
    group = meshes.group("ep")  # a collective call, so also in a stage without experts
    if not experts_modules(model):
        return []
    cut = apply_expert_parallel(model, group, tp_group=tensor, sequence_parallel=options.sequence_parallel)
    if streams is not None:
        for module in cut.values():
            module.forward = streams.within(True, module.forward)
    return list(cut.values())


def _build_pipeline(
    objective: ParallelObjective,
    options: ParallelOptions,
    plan: PipelinePlan,
    views: Sequence[StageView],
    group: dist.ProcessGroup,
    device: torch.device,
    after_weights: Callable[[], None],
) -> Pipeline:
    """The pipeline of this rank's stages."""
    parameter_dtype = next(p.dtype for p in objective.model.parameters() if p.is_floating_point())
    return Pipeline(
        plan,
        views,
        group,
        device,
        objective,
        COMPUTE_DTYPES[options.precision] or parameter_dtype,
        in_stage=partial(run_stage, objective),
        after_weights=after_weights,
        measure=not options.compile_model,
    )


def _shard(
    model: torch.nn.Module,
    meshes: Meshes,
    dims: ParallelDims,
    options: ParallelOptions,
    experts: Sequence[torch.nn.Module],
) -> FSDPModule:
    """Shard by FSDP2, the experts over their own mesh."""
    sharding = options.sharding
    if dims.pp > 1 and sharding.reshard_after_forward == "auto":
        # Several micro-batches run at once, and each would gather the weights again.
        sharding = replace(sharding, reshard_after_forward=False)
    expert_mesh = meshes.data_mesh("expert_shard") if dims.ep > 1 else None
    return apply_fully_shard(
        model, meshes.data_mesh(), options.precision, sharding, experts=experts, expert_mesh=expert_mesh
    )


def run_stage(
    objective: ParallelObjective, batch: MicroBatch, last: bool, scale: float, compute: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Run the forward pass of a pipeline stage within the sequences of its micro-batch."""
    with in_sequences(objective.model, batch):
        if last or not isinstance(objective, StageLoss):
            return compute()
        return objective.stage_output(batch, scale, compute)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move everything but the parameters to ``device``."""
    for module in model.modules():
        for tensors in (module._buffers, module.__dict__):
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    tensors[name] = value.to(device)
