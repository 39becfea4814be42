"""A model split over the axes of the mesh, and what has to be summed over which ranks once a step batch is through.

Order: pipeline stages are cut out, then tensor and expert parallelism cut parameters, context parallelism
changes attention; then activation checkpointing, compilation, and FSDP2 over what is left. Then the parameters are
filled, each rank's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from mgpu_pipe.compat.torch_private import find_fsdp_units
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.kernels.norms import add_up_in_fp32
from mgpu_pipe.models.parts import cast_parameters
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.packed_text import STARTS
from mgpu_pipe.parallel.activation_checkpointing import Mode, apply_activation_checkpointing
from mgpu_pipe.parallel.compile import compile_blocks
from mgpu_pipe.parallel.context import (
    DOCUMENTS,
    Method,
    apply_context_parallel,
    documents_of,
    in_sequences,
    with_documents,
)
from mgpu_pipe.parallel.context_sequences import forget_sequences
from mgpu_pipe.parallel.ddp import GradientReducer
from mgpu_pipe.parallel.expert import apply_expert_parallel, experts_modules
from mgpu_pipe.parallel.expert_load import ExpertLoad
from mgpu_pipe.parallel.float8 import use_float8
from mgpu_pipe.parallel.fsdp import COMPUTE_DTYPES, ShardingOptions, UsedParameters, apply_fully_shard, reshard_all
from mgpu_pipe.parallel.pipeline import Pipeline, PipelinePlan
from mgpu_pipe.parallel.pipeline_stages import tied_parameter
from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.randomness import uses_dropout
from mgpu_pipe.parallel.tensor import apply_tensor_parallel
from mgpu_pipe.parallel.tensor_gradients import reduce_replicated_gradients
from mgpu_pipe.strategies.step_gradients import StepGradients, counted_once
from mgpu_pipe.topology import Meshes, ParallelDims

MicroBatch = Mapping[str, torch.Tensor]
Fill = Callable[[Any, torch.device], object]


@dataclass(frozen=True)
class ParallelOptions:
    """How a model is split, beyond the sizes of the axes.

    Attributes:
        precision: ``fp32``, ``bf16``, ``bf16_true``, ``fp16`` or ``fp8``.
        fp8_recipe: torchao's name of how ``fp8`` scales.
        bucket_mib: size of a gradient bucket of plain data parallelism.
        sharding: options of FSDP2.
        pipeline: which stage is where; needed where ``pp`` is above 1.
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


class ParallelModel:
    """The model of ``objective`` on this rank; making one is a collective call.

    Args:
        dims: the sizes of every axis.
        device: this process's.
        fill: fills parameters and buffers of a model that is still on the meta device, in place; None for one that
            holds its weights.

    Attributes:
        meshes: the groups of ranks that this rank is in.
        parameters: those that are trained, of this rank.
        sharded: the model as FSDP2's root, where that is at work.
        pipeline: this rank's stages, where there are several.
        facts: of the step batch that is under way.
        streams: where dropout draws from, where tensor-parallel ranks hold some activations whole and parts of others.
    """

    def __init__(
        self,
        objective: Objective,
        dims: ParallelDims,
        device: torch.device,
        options: ParallelOptions,
        fill: Fill | None,
    ) -> None:
        self._objective, self._dims, self._device, self._options = objective, dims, device, options
        self.sharded: FSDPModule | None = None
        self.pipeline: Pipeline | None = None
        self.streams: RankStreams | None = None
        self.meshes = Meshes(dims, device.type)
        self._groups: dict[str, dist.ProcessGroup] = {}
        model = objective.model
        if options.precision == "bf16_true":
            cast_parameters(model, torch.bfloat16)
        elif options.precision == "fp8":
            use_float8(model, options.fp8_recipe, dims.tp)
        # Of the whole model: a pipeline's stage may have none.
        self._num_experts = ExpertLoad.experts_of(model)
        experts = self._cut(model) if dims.uses_model_axes else []
        self._load: ExpertLoad | None = None
        self._stage: dist.ProcessGroup | None = None
        if self._num_experts:
            self._watch_experts(model)
        add_up_in_fp32(model)
        apply_activation_checkpointing(model, options.activation_checkpointing)
        if options.compile_model:
            compile_blocks(model)
        if dims.dp_shard > 1 or dims.uses_model_axes or options.precision != "fp32" or options.sharding.offload:
            self._shard(model, experts)
        if fill is not None:
            fill(model, torch.device("cpu") if options.sharding.offload else device)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        reducer, used = None, None
        if self.sharded is not None:
            if options.sharding.offload:
                _move_buffers(model, device)
            used = UsedParameters(model, self.parameters)
            if self.pipeline is not None:
                find_fsdp_units(self.sharded)
        elif dims.data_parallel_size > 1:
            reducer = GradientReducer(self.parameters, options.bucket_mib)
        counted = counted_once(model) if dims.uses_model_axes else None
        self.facts = StepGradients(self.parameters, reducer, used, counted, device)

    # -- splitting ----------------------------------------------------------------------------------------------

    def _cut(self, model: Any) -> list[torch.nn.Module]:
        """Everything but data parallelism; the modules of experts that were cut."""
        dims, options = self._dims, self._options
        random = uses_dropout(model)
        self._groups = {axis: self.meshes.group(axis) for axis in ("pp", "cp", "tp") if getattr(dims, axis) > 1}
        tensor = self._groups.get("tp")
        views = []
        if dims.pp > 1:
            assert options.pipeline is not None
            views = options.pipeline.cut(model, self._groups["pp"].rank())
        if tensor is not None:
            self.streams = RankStreams(model, self._device) if random else None
            apply_tensor_parallel(
                model,
                tensor,
                sequence_parallel=options.sequence_parallel,
                experts=dims.ep == 1,
                stages=[view.layers for view in views],
                streams=self.streams,
            )
        experts: list[torch.nn.Module] = []
        if dims.ep > 1:
            group = self.meshes.group("ep")
            if experts_modules(model):  # a pipeline stage may have none
                experts = list(
                    apply_expert_parallel(
                        model, group, tp_group=tensor, sequence_parallel=options.sequence_parallel
                    ).values()
                )
                for module in experts if self.streams is not None else []:
                    assert self.streams is not None
                    module.forward = self.streams.within(True, module.forward)
        if dims.cp > 1:
            apply_context_parallel(model, self._groups["cp"], options.context_method, self._objective.batch_spec)
        # Routers see a part of the sequence, unless their experts are cut over the same ranks: then all of it.
        along = tensor if options.sequence_parallel and dims.ep > 1 else None
        self._objective.share_sequences([self._groups["cp"]] if dims.cp > 1 else [], along)
        if views:
            assert options.pipeline is not None
            own = next(p.dtype for p in model.parameters() if p.is_floating_point())
            compute = COMPUTE_DTYPES[options.precision] or own
            self.pipeline = Pipeline(
                options.pipeline,
                views,
                self._groups["pp"],
                self._device,
                self._objective,
                compute,
                in_stage=self._in_stage,
                after_weights=lambda: self.facts.note_gradients(),
                measure=not options.compile_model,
            )
        return experts

    def _watch_experts(self, model: Any) -> None:
        """Count the tokens of every expert. A collective call."""
        if self._dims.world_size > self._dims.pp:
            self._stage = self.meshes.group("stage")
        if experts_modules(model):
            self._load = ExpertLoad(model, self._device)

    def _shard(self, model: Any, experts: list[torch.nn.Module]) -> None:
        dims, options = self._dims, self._options.sharding
        if dims.pp > 1 and options.reshard_after_forward == "auto":
            # Several micro-batches are under way at once, and each would gather the weights again.
            options = replace(options, reshard_after_forward=False)
        self.sharded = apply_fully_shard(
            model,
            self.meshes.data_mesh(),
            self._options.precision,
            options,
            experts=experts,
            expert_mesh=self.meshes.data_mesh("expert_shard") if dims.ep > 1 else None,
        )

    def _in_stage(
        self, batch: MicroBatch, last: bool, scale: float, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A stage's forward pass among its micro-batch's sequences, with what the objective adds to its output."""
        with in_sequences(self._objective.model, batch):
            return compute() if last else self._objective.stage_output(batch, scale, compute)

    # -- a step batch ------------------------------------------------------------------------------------------

    def part_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch of its data-parallel rank, and what attention has to know of it.

        Along a pipeline only the fields that its stages need.
        """
        kept = (*self.fields, *(name for name in (STARTS, DOCUMENTS) if name in micro_batch))
        return with_documents(self._objective.model, {name: micro_batch[name] for name in kept})

    def known_on_host(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """What :meth:`part_of` would have to read of a micro-batch that is on the device, from one that is not yet."""
        return documents_of(self._objective.model, micro_batch)

    @property
    def fields(self) -> tuple[str, ...]:
        """Of a micro-batch, those that this rank needs."""
        stages = self.pipeline.views.values() if self.pipeline is not None else ()
        first = not stages or any(stage.first for stage in stages)
        last = not stages or any(stage.last for stage in stages)
        return self._objective.batch_spec.needed(first, last)

    @property
    def counts_its_loss(self) -> bool:
        """Whether this rank's sum of losses is to be added; tensor-parallel ranks have the same one."""
        return "tp" not in self._groups or self._groups["tp"].rank() == 0

    def begin_backward(self, last: bool) -> None:
        """Announce a micro-batch; ``last`` is the step batch's last. A pipeline does so by itself."""
        self.facts.begin_backward(last, self.sharded, self.shards)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 has several ranks to shard over."""
        return self._dims.dp_shard * self._dims.cp > 1 or self._dims.ep > 1

    def forward(self, part: MicroBatch) -> torch.Tensor:
        """The sum of losses of this rank's part (:meth:`part_of`) of a micro-batch, without a pipeline."""
        with in_sequences(self._objective.model, part):
            return self._objective.micro_batch_loss(part)

    def evaluate(self, part: MicroBatch) -> torch.Tensor:
        """The sums of the evaluation of this rank's part of a micro-batch, without a pipeline."""
        with in_sequences(self._objective.model, part):
            return self._objective.evaluation_sums(part)

    def end_step(
        self, loss_sum: torch.Tensor, told: list[float], step_batch: StepBatch
    ) -> tuple[float, float, list[float]]:
        """See :meth:`StepGradients.end`."""
        forget_sequences()
        own = loss_sum if self.counts_its_loss else torch.zeros_like(loss_sum)
        return self.facts.end(own, told, step_batch, self._reduce_axes)

    def _reduce_axes(self) -> list[torch.nn.Parameter]:
        """See :meth:`StepGradients.end`; the weight that is tied across stages is its own and another's."""
        if "tp" in self._groups:
            reduce_replicated_gradients(self._objective.model, self._groups["tp"])
        if self.pipeline is not None:
            self.pipeline.reduce_tied_gradients()
        tied = tied_parameter(self._objective.model)
        return [] if tied is None else [tied[1]]

    def step_metrics(self) -> dict[str, float]:
        """How the tokens were spread over the experts since the last call; empty for a dense model. Collective.

        ``experts/tokens_<i>`` counts, over all layers, the assignments that expert i was given: a token counts once for
        each of its ``top_k`` experts.
        """
        if not self._num_experts:
            return {}
        uneven, counts = 0.0, [0.0] * (1 + self._num_experts)
        if self._load is not None:
            load = self._load.take(self._stage, 1 if self._options.sequence_parallel else self._dims.tp)
            uneven = load.max_over_mean
            counts[: 1 + len(load.by_expert)] = [float(load.dropped), *map(float, load.by_expert)]
        if "pp" in self._groups:
            worst = torch.tensor([uneven], dtype=torch.float64, device=self._device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._groups["pp"])
            total = torch.tensor(counts, dtype=torch.float64, device=self._device)
            dist.all_reduce(total, group=self._groups["pp"])
            uneven, counts = worst.item(), total.tolist()
        names = ["dropped_tokens", *(f"tokens_{expert}" for expert in range(self._num_experts))]
        return {
            "experts/load_max_over_mean": uneven,
            **{f"experts/{name}": count for name, count in zip(names, counts, strict=True)},
        }

    def settle(self) -> None:
        """Back to the sharded fp32 parameters: a forward pass without backward leaves the compute copies in place."""
        forget_sequences()
        if self.sharded is not None:
            reshard_all(self.sharded)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Bring everything but the parameters to ``device``."""
    for module in model.modules():
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    holder[name] = value.to(device)
