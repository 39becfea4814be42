"""The mesh engine: one Lightning Strategy on a torch device mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import Self

from mgpu_pipe.checkpoint.adapters import gradient_pieces, model_pieces, optimizer_pieces
from mgpu_pipe.checkpoint.boxes import Piece
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.validate import resolve_precision
from mgpu_pipe.data.window import StepWindow
from mgpu_pipe.models.parts import cast_parameters
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.parallel.activation_checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.compile import compile_blocks
from mgpu_pipe.parallel.data import GradientReducer
from mgpu_pipe.parallel.float8 import use_float8
from mgpu_pipe.parallel.fully_shard import (
    ShardingOptions,
    UsedParameters,
    apply_fully_shard,
    reshard_all,
    set_gradient_sync,
)  # fmt: skip
from mgpu_pipe.parallel.gradients import clip_gradients, gradient_norm, scale_gradients
from mgpu_pipe.parallel.loss_scale import LossScale
from mgpu_pipe.parallel.memory import ForwardMeter, gathered_bytes, storage_bytes
from mgpu_pipe.parallel.randomness import step_seed
from mgpu_pipe.strategies.base import EngineStrategy, Materialise, NonFiniteStep
from mgpu_pipe.topology import ParallelDims

__all__ = ["MeshStrategy", "NonFiniteStep"]


class MeshStrategy(EngineStrategy):
    """Runs whole optimizer steps on a mesh of processes.

    The process group exists already when the strategy is made. ``fp32`` data parallelism keeps whole weights and sums
    gradients by :class:`GradientReducer`; sharding and ``bf16`` go through FSDP2.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
        precision: ``fp32``, ``bf16``, ``bf16_true``, ``fp16`` or ``fp8``.
        max_norm: largest global gradient norm, or None.
        bucket_mib: size of a gradient bucket.
        materialise: fills the parameters and buffers of a model that was built on the meta device, in place.
        dropout_seed: the run's seed, where the model drops anything out; None leaves the generators alone.
        stop_requested: whether this process was told to stop.
        sharding: options of ``dp_shard``.
        activation_checkpointing: ``none``, ``full`` or ``selective``.
        compile_model: compile each block.
    """

    strategy_name = "mgpu_mesh"

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        *,
        precision: str = "fp32",
        max_norm: float | None = None,
        bucket_mib: float = 25.0,
        materialise: Materialise | None = None,
        dropout_seed: int | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        sharding: ShardingOptions | None = None,
        activation_checkpointing: Literal["none", "full", "selective"] = "none",
        compile_model: bool = False,
    ) -> None:
        super().__init__(dims, device)
        self._precision = precision
        self._max_norm = max_norm
        self._bucket_mib = bucket_mib
        self._materialise = materialise
        self._dropout_seed = dropout_seed
        self._stop_requested = stop_requested
        self._sharding = sharding or ShardingOptions()
        self._activation_checkpointing = activation_checkpointing
        self._compile_model = compile_model
        self._reducer: GradientReducer | None = None
        self._sharded: FSDPModule | None = None
        self._used: UsedParameters | None = None
        self._memory: dict[str, int] = {}
        self._loss_scale = LossScale() if precision == "fp16" else None
        self._parameters: list[torch.nn.Parameter] = []

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        dims: ParallelDims,
        device: torch.device,
        *,
        materialise: Materialise | None,
        dropout_seed: int | None,
        stop_requested: Callable[[], bool],
    ) -> Self:
        """Build the strategy of a run; a plug-in's subclass reads its own keys here."""
        return cls(
            dims,
            device,
            precision=resolve_precision(config),
            max_norm=config.trainer.gradient_clip_val,
            bucket_mib=config.strategy.bucket_mib,
            materialise=materialise,
            dropout_seed=dropout_seed,
            stop_requested=stop_requested,
            sharding=ShardingOptions(
                config.strategy.fsdp.reshard_after_forward, config.strategy.fsdp.prefetch,
                offload=config.strategy.offload == "cpu",
            ),
            activation_checkpointing=config.strategy.activation_checkpointing,
            compile_model=config.model.compile,
        )  # fmt: skip

    # -- what Lightning asks ------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        objective = self.objective
        if not self._parameters:
            self.parallelise(objective.model)
        self.model = objective
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group.setdefault("initial_lr", group["lr"])
        self.setup_precision_plugin()

    # -- assembling ---------------------------------------------------------------------------------------------

    def parallelise(self, model: torch.nn.Module) -> None:
        """Split ``model`` over the mesh, then fill its parameters, each rank its own parts. A collective call."""
        if self._precision == "bf16_true":
            cast_parameters(model, torch.bfloat16)
        elif self._precision == "fp8":
            use_float8(model)
        apply_activation_checkpointing(model, self._activation_checkpointing)
        if self._compile_model:
            compile_blocks(model)
        if self.dims.dp_shard > 1 or self._precision != "fp32" or self._sharding.offload:
            self._sharded = apply_fully_shard(model, self._data_mesh(), self._precision, self._sharding)
        if self._materialise is not None:
            self._materialise(model, torch.device("cpu") if self._sharding.offload else self._device)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if self._sharded is not None:
            if self._sharding.offload:
                _move_buffers(model, self._device)
            self._used = UsedParameters(model, self._parameters)
        elif self.dims.data_parallel_size > 1:
            self._reducer = GradientReducer(self._parameters, None, self._bucket_mib)

    def _data_mesh(self) -> DeviceMesh:
        """Shards alone where there is one replica, so that nothing is reduced over an axis of size 1."""
        axes = ("dp_shard",) if self.dims.dp_replicate == 1 else ("dp_replicate", "dp_shard")
        return self.dims.device_mesh(self._device.type)[axes]

    # -- one step -----------------------------------------------------------------------------------------------

    def run_step(self, window: StepWindow) -> StepResult:
        """Forward and backward of all micro-batches, reduction, norm, finite check and clipping (not the update).

        Raises:
            NonFiniteStep: on every rank alike, before the update.
        """
        if self._dropout_seed is not None:
            at = self.dims.data_parallel_rank(self.global_rank)
            torch.manual_seed(step_seed(self._dropout_seed, window.step, at))
        if self._reducer is not None:
            # Here, not after the update: Lightning and its callbacks may have set gradients to None since.
            self._reducer.zero()
        if self._used is not None:
            self._used.clear()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, micro_batch in enumerate(window.micro_batches):
            last = index == len(window.micro_batches) - 1
            if self._reducer is not None:
                self._reducer.start(last)
            elif self._sharded is not None:
                set_gradient_sync(self._sharded, last, self.dims.dp_shard > 1)
            loss = self._forward(micro_batch)
            scale = self._loss_scale.value if self._loss_scale is not None else 1.0
            loss.backward(torch.full_like(loss, scale / window.normalizer))
            loss_sum += loss.detach()
        return self._finish_step(window, loss_sum)

    def _forward(self, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The micro-batch's loss; the first one's activations are measured."""
        if "activations" in self._memory or self._compile_model:
            return self.objective.micro_batch_loss(micro_batch)
        with ForwardMeter(self._device) as meter:
            loss = self.objective.micro_batch_loss(micro_batch)
        gathered = gathered_bytes(self.objective.model) if self._sharded is not None else 0
        self._memory["activations"] = max(0, meter.left_bytes() - gathered)
        return loss

    def _finish_step(self, window: StepWindow, loss_sum: torch.Tensor) -> StepResult:
        used, parameters = self._gradients_seen()
        if "gradients" not in self._memory:
            self._memory["gradients"] = storage_bytes(p.grad for p in self._parameters if p.grad is not None)
        stop = 1.0 if self._stop_requested() else 0.0
        # One small all-reduce tells every rank the loss, whether any is to stop, and which gradients exist.
        facts = torch.cat([loss_sum.reshape(1), torch.tensor([stop, *map(float, used)], device=self._device)])
        facts = self.sum_over_data(facts)
        unused = facts[2:] == 0
        norm = gradient_norm(self._parameters, self._device)
        # One copy to the host for all that it decides.
        scalars = torch.stack([facts[0] / window.normalizer, facts[1], norm, unused.sum().double()])
        loss, stopping, norm_value, num_unused = scalars.tolist()
        if num_unused:
            # No process used them: none, as one process has, and not the zeros that were reduced.
            for index in torch.nonzero(unused).flatten().tolist():
                parameters[index].grad = None
        if not _finite(loss):
            raise NonFiniteStep("the loss", window)
        if self._loss_scale is not None:
            norm_value /= self._loss_scale.value
            if not self._unscale(window, _finite(norm_value)):
                return StepResult(loss, norm_value, stopping > 0, skipped=True)
        if not _finite(norm_value):
            raise NonFiniteStep("the gradient norm", window)
        if self._max_norm is not None:
            clip_gradients(self._parameters, norm_value, self._max_norm)
        return StepResult(loss, norm_value, stopping > 0)

    def _unscale(self, window: StepWindow, finite: bool) -> bool:
        """Take the loss scale out of the gradients and adapt it; whether there is to be an update."""
        assert self._loss_scale is not None
        if finite:
            scale_gradients(self._parameters, 1.0 / self._loss_scale.value)
        try:
            self._loss_scale.update(finite)
        except OverflowError:
            raise NonFiniteStep("the gradient norm", window) from None
        return finite

    def _gradients_seen(self) -> tuple[list[bool], list[torch.nn.Parameter]]:
        """Wait for what is being reduced; which of these parameters got a gradient on this process."""
        if self._reducer is not None:
            return self._reducer.finish(), self._reducer.parameters
        if self._used is not None:
            return self._used.flags, self._parameters
        return [], []

    def zero_gradients(self) -> None:
        """Free the gradients; the reducer's stay in its buckets and are cleared when the next window starts."""
        if self._reducer is None:
            for parameter in self._parameters:
                parameter.grad = None

    @torch.no_grad()
    def run_evaluation(self, window: StepWindow) -> torch.Tensor:
        objective = self.objective
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        micro_batches = window.micro_batches
        if self.dims.dp_shard > 1:
            micro_batches = self._as_many_as_any(micro_batches)
        for micro_batch in micro_batches:
            total += objective.micro_batch_loss(micro_batch)
        self._settle()
        return total

    def _as_many_as_any(self, micro_batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """The micro-batches, and empty ones until every rank has as many: a forward pass gathers from all ranks."""
        length = next(iter(micro_batches[0].values())).shape[1] if micro_batches else 0
        most = torch.tensor([len(micro_batches), length], device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        count, length = most.tolist()
        missing = count - len(micro_batches)
        return [*micro_batches, *[self.objective.empty_micro_batch(length, self._device)] * missing]

    # -- state --------------------------------------------------------------------------------------------------

    def model_pieces(self) -> list[Piece]:
        """This rank's parts of the weights, as live tensors."""
        self._settle()
        return model_pieces(self.objective.model)

    def optimizer_pieces(self) -> list[Piece]:
        """This rank's parts of the optimizer state, as live tensors."""
        self._settle()
        return optimizer_pieces(self.objective.model, self.optimizers[0])

    def gradient_pieces(self) -> list[Piece]:
        """This rank's parts of the gradients, as live tensors."""
        self._settle()
        return gradient_pieces(self.objective.model)

    def state_entries(self) -> dict[str, Any]:
        """What ``state.json`` keeps of this strategy, equal on every rank."""
        return {"loss_scale": self._loss_scale.state()} if self._loss_scale is not None else {}

    def restore_entries(self, state: Mapping[str, Any]) -> None:
        """Take back :meth:`state_entries` from a checkpoint's state, which may be of another precision."""
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale.restore(state["loss_scale"])

    def memory_parts(self) -> dict[str, int]:
        """Bytes this rank keeps: of weights, gradients and optimizer state, and of activations.

        Activations are what the run's first forward pass left for its backward pass (not known where blocks are
        compiled); gradients are those after the first window.
        """
        self._settle()
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return {
            "weights": storage_bytes(self.objective.model.parameters()),
            "gradients": self._memory.get("gradients", 0),
            "optimizer": storage_bytes(v for state in states for v in state.values() if isinstance(v, torch.Tensor)),
            **{name: size for name, size in self._memory.items() if name == "activations"},
        }

    def _settle(self) -> None:
        """Back to the sharded fp32 parameters: a forward pass without backward leaves the compute copies in place."""
        if self._sharded is not None:
            reshard_all(self._sharded)


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Bring everything but the parameters to ``device``."""
    for module in model.modules():
        for holder in (module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    holder[name] = value.to(device)


def _finite(value: float) -> bool:
    return value - value == 0.0
