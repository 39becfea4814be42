"""A model split over the axes of the mesh, and what has to be summed over which ranks once a step window is through.

Order (DESIGN 8): pipeline stages are cut out, then tensor and expert parallelism cut parameters, context parallelism
changes attention; then activation checkpointing, compilation, and FSDP2 over what is left. Then the parameters are
filled, each rank's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from mgpu_pipe.data.window import StepWindow
from mgpu_pipe.models.layout import layouts_of
from mgpu_pipe.models.parts import cast_parameters
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.parallel.activation_checkpointing import Mode, apply_activation_checkpointing
from mgpu_pipe.parallel.compile import compile_blocks
from mgpu_pipe.parallel.context import Method, apply_context_parallel, in_sequences, with_documents
from mgpu_pipe.parallel.data import GradientReducer
from mgpu_pipe.parallel.expert import apply_expert_parallel, experts_modules
from mgpu_pipe.parallel.float8 import use_float8
from mgpu_pipe.parallel.fully_shard import (
    COMPUTE_DTYPES,
    ShardingOptions,
    UsedParameters,
    apply_fully_shard,
    find_units,
    reshard_all,
    set_gradient_sync,
)  # fmt: skip
from mgpu_pipe.parallel.gradients import counted_norm, gradient_norm
from mgpu_pipe.parallel.pipeline import Pipeline, PipelinePlan
from mgpu_pipe.parallel.tensor import apply_tensor_parallel
from mgpu_pipe.parallel.tensor_gradients import reduce_replicated_gradients
from mgpu_pipe.topology import ParallelDims

MicroBatch = Mapping[str, torch.Tensor]
Fill = Callable[[Any, torch.device], object]


@dataclass(frozen=True)
class SplitOptions:
    """How a model is split, beyond the sizes of the axes.

    Attributes:
        precision: ``fp32``, ``bf16``, ``bf16_true``, ``fp16`` or ``fp8``.
        bucket_mib: size of a gradient bucket of plain data parallelism.
        sharding: options of FSDP2.
        pipeline: which stage is where; needed where ``pp`` is above 1.
    """

    precision: str = "fp32"
    bucket_mib: float = 25.0
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    activation_checkpointing: Mode = "none"
    compile_model: bool = False
    sequence_parallel: bool = False
    pipeline: PipelinePlan | None = None
    context_method: Method = "ring"


class SplitModel:
    """The model of ``objective`` on this rank; making one is a collective call.

    Args:
        dims: the sizes of every axis.
        device: this process's.
        fill: fills parameters and buffers of a model that is still on the meta device, in place; None for one that
            holds its weights.

    Attributes:
        parameters: those that are trained, of this rank.
        sharded: the model as FSDP2's root, where that is at work.
        pipeline: this rank's stages, where there are several.
    """

    def __init__(
        self, objective: Objective, dims: ParallelDims, device: torch.device, options: SplitOptions, fill: Fill | None
    ) -> None:
        self._objective, self._dims, self._device, self._options = objective, dims, device, options
        self.sharded: FSDPModule | None = None
        self.pipeline: Pipeline | None = None
        self._reducer: GradientReducer | None = None
        self._used: UsedParameters | None = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        model = objective.model
        if options.precision == "bf16_true":
            cast_parameters(model, torch.bfloat16)
        elif options.precision == "fp8":
            use_float8(model)
        experts = self._cut(model) if dims.uses_model_axes else []
        apply_activation_checkpointing(model, options.activation_checkpointing)
        if options.compile_model:
            compile_blocks(model)
        if self._needs_sharding:
            self._shard(model, experts)
        if fill is not None:
            fill(model, torch.device("cpu") if options.sharding.offload else device)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if self.sharded is not None:
            if options.sharding.offload:
                _move_buffers(model, device)
            self._used = UsedParameters(model, self.parameters)
            if self.pipeline is not None:
                find_units(self.sharded)
        elif dims.data_parallel_size > 1:
            self._reducer = GradientReducer(self.parameters, None, options.bucket_mib)
        self._counted = _counted(model) if dims.uses_model_axes else None

    @property
    def _needs_sharding(self) -> bool:
        """Whether FSDP2 has anything to do; its hooks cost time also where it shards over one rank."""
        dims, options = self._dims, self._options
        if options.precision != "fp32" or options.sharding.offload or dims.dp_shard * dims.cp * dims.ep > 1:
            return True
        return dims.uses_model_axes and dims.dp_replicate > 1

    # -- splitting ----------------------------------------------------------------------------------------------

    def _cut(self, model: Any) -> list[torch.nn.Module]:
        """Everything but data parallelism; the modules of experts that were cut."""
        dims, options = self._dims, self._options
        mesh = dims.device_mesh(self._device.type)
        self._groups = {axis: mesh.get_group(axis) for axis in ("pp", "cp", "tp") if getattr(dims, axis) > 1}
        tensor = self._groups.get("tp")
        views = []
        if dims.pp > 1:
            assert options.pipeline is not None
            views = options.pipeline.cut(model, self._groups["pp"].rank())
        if tensor is not None:
            apply_tensor_parallel(
                model, tensor, sequence_parallel=options.sequence_parallel, experts=dims.ep == 1,
                stages=[view.layers for view in views],
            )
        experts: list[torch.nn.Module] = []
        if dims.ep > 1:
            group = dims.expert_mesh(self._device.type).get_group("ep")
            if experts_modules(model):  # a pipeline stage may have none
                experts = list(
                    apply_expert_parallel(
                        model, group, tp_group=tensor, sequence_parallel=options.sequence_parallel
                    ).values()
                )
        if dims.cp > 1:
            apply_context_parallel(model, self._groups["cp"], options.context_method)
        router_loss = getattr(self._objective, "router_loss", None)
        if router_loss is not None:
            along = tensor if options.sequence_parallel else None
            router_loss.reduce_over([self._groups["cp"]] if dims.cp > 1 else [], along)
        if views:
            assert options.pipeline is not None
            compute = COMPUTE_DTYPES[options.precision] or next(model.parameters()).dtype
            self.pipeline = Pipeline(
                options.pipeline, views, self._groups["pp"], self._device, self._objective.micro_batch_loss, compute,
                in_stage=self._in_stage, after_weights=self._note_gradients,
            )  # fmt: skip
        return experts

    def _shard(self, model: Any, experts: list[torch.nn.Module]) -> None:
        dims, options = self._dims, self._options.sharding
        if dims.pp > 1 and options.reshard_after_forward == "auto":
            # Several micro-batches are under way at once, and each would gather the weights again.
            options = ShardingOptions(False, options.prefetch, options.offload)
        mesh = dims.data_mesh(self._device.type)
        expert_mesh = None
        if dims.ep > 1:
            whole = dims.expert_mesh(self._device.type)
            expert_mesh = whole["expert_shard"] if dims.dp_replicate == 1 else whole["dp_replicate", "expert_shard"]
        self.sharded = apply_fully_shard(
            model, mesh, self._options.precision, options, experts=experts, expert_mesh=expert_mesh
        )

    def _in_stage(
        self, batch: MicroBatch, last: bool, scale: float, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A stage's forward pass among its micro-batch's sequences, with its routers' balance loss."""
        router_loss = getattr(self._objective, "router_loss", None)
        with in_sequences(self._objective.model, batch):
            if router_loss is None or last or not torch.is_grad_enabled():
                return compute()
            with router_loss.collecting():
                return cast(torch.Tensor, router_loss.attached(compute(), batch["labels"], scale))

    def _note_gradients(self) -> None:
        if self._used is not None:
            self._used.note_gradients()

    # -- a step window ------------------------------------------------------------------------------------------

    def part_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of a micro-batch of its data-parallel rank, and what attention has to know of it."""
        return with_documents(self._objective.model, micro_batch)

    @property
    def counts_its_loss(self) -> bool:
        """Whether this rank's sum of losses is to be added; tensor-parallel ranks have the same one."""
        return "tp" not in self._groups or self._groups["tp"].rank() == 0

    def begin_window(self) -> None:
        """Forget the last window's gradients."""
        if self._reducer is not None:
            # Here, not after the update: Lightning and its callbacks may have set gradients to None since.
            self._reducer.zero()
        if self._used is not None:
            self._used.clear()

    def begin_backward(self, last: bool) -> None:
        """Announce a micro-batch; ``last`` is the window's last. A pipeline sees to it itself."""
        if self._reducer is not None:
            self._reducer.start(last)
        elif self.sharded is not None:
            set_gradient_sync(self.sharded, last, self.shards)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 has several ranks to shard over."""
        return self._dims.dp_shard * self._dims.cp > 1 or self._dims.ep > 1

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of losses of this rank's part of a micro-batch, without a pipeline."""
        part = self.part_of(micro_batch)
        with in_sequences(self._objective.model, part):
            return self._objective.micro_batch_loss(part)

    def end_window(self, loss_sum: torch.Tensor, stop: bool, window: StepWindow) -> tuple[float, float, bool]:
        """The window's global loss, gradient norm, and whether any rank is to stop; equal on all. A collective call.

        Gradients that no process produced are None afterwards, as in one process, and not the zeros that were reduced.
        """
        told = torch.tensor([1.0 if stop else 0.0], dtype=torch.float64, device=self._device)
        if not self.counts_its_loss:
            loss_sum = torch.zeros_like(loss_sum)
        facts = torch.cat([loss_sum.reshape(1), told])
        used, parameters = self._gradients_seen()
        if self._counted is None:
            # One small all-reduce tells every rank the loss, whether any is to stop, and which gradients exist.
            flags = torch.tensor(used, dtype=torch.float64, device=self._device)
            facts = _summed(torch.cat([facts, flags]))
            unused = facts[2:] == 0
        else:
            facts = _summed(facts)
            unused = self._unused_of(used, parameters)
        num_unused = unused.sum().double()
        if self._counted is None:
            norm = gradient_norm(self.parameters, self._device)
            # One copy to the host for all that it decides.
            values = torch.stack([facts[0] / window.normalizer, facts[1], norm, num_unused]).tolist()
            self._forget(unused, parameters, values[3])
            return values[0], values[2], values[1] > 0
        self._forget(unused, parameters, float(num_unused))
        if "tp" in self._groups:
            reduce_replicated_gradients(self._objective.model, self._groups["tp"])
        if self.pipeline is not None:
            self.pipeline.reduce_tied_gradients()
        norm = counted_norm(self.parameters, self._counted, self._device)
        values = torch.stack([facts[0] / window.normalizer, facts[1], norm]).tolist()
        return values[0], values[2], values[1] > 0

    def _gradients_seen(self) -> tuple[list[bool], list[torch.nn.Parameter]]:
        """Wait for what is being reduced; which of these parameters got a gradient on this process."""
        if self._reducer is not None:
            return self._reducer.finish(), self._reducer.parameters
        if self._used is not None:
            return self._used.flags, self.parameters
        return [], []

    def _unused_of(self, used: list[bool], parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Which parameters got no gradient on any rank that holds a part of them. A collective call."""
        flags = torch.tensor(used, dtype=torch.float64, device=self._device)
        by_mesh: dict[Any, list[int]] = {}
        for index, parameter in enumerate(parameters):
            assert isinstance(parameter, DTensor)
            by_mesh.setdefault(parameter.device_mesh, []).append(index)
        for mesh, indices in by_mesh.items():
            of_mesh = flags[indices]
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1:
                    dist.all_reduce(of_mesh, group=mesh.get_group(dim))
            flags[indices] = of_mesh
        return flags == 0

    def _forget(self, unused: torch.Tensor, parameters: list[torch.nn.Parameter], count: float) -> None:
        if count:
            for index in torch.nonzero(unused).flatten().tolist():
                parameters[index].grad = None

    def zero_gradients(self) -> None:
        """Free the gradients; the reducer's stay in its buckets and are cleared when the next window starts."""
        if self._reducer is None:
            for parameter in self.parameters:
                parameter.grad = None

    def settle(self) -> None:
        """Back to the sharded fp32 parameters: a forward pass without backward leaves the compute copies in place."""
        if self.sharded is not None:
            reshard_all(self.sharded)


def _summed(values: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def _counted(model: torch.nn.Module) -> list[bool]:
    """For each trained parameter whether this rank's part counts in the norm: every element on one rank."""
    layouts = layouts_of(model)
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layout = layouts.get(name)
        counts = layout is None or layout.owned
        if counts and isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            at = mesh.get_coordinate()
            assert at is not None
            counts = all(
                at[dim] == 0 for dim, kind in enumerate(parameter.placements) if isinstance(kind, Replicate)
            )
        found.append(counts)
    return found


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Bring everything but the parameters to ``device``."""
    for module in model.modules():
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    holder[name] = value.to(device)
