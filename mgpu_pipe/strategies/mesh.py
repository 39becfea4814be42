"""The mesh engine: one Lightning Strategy on a torch device mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch.distributed.fsdp import FSDPModule
from typing_extensions import Self

from mgpu_pipe.checkpoint.adapters import named_tensor_pieces, optimizer_pieces
from mgpu_pipe.checkpoint.boxes import Piece
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.validate import resolve_precision
from mgpu_pipe.data.window import StepWindow
from mgpu_pipe.objectives.base import StepResult
from mgpu_pipe.parallel.data import GradientReducer
from mgpu_pipe.parallel.fully_shard import apply_fully_shard, reshard_all, set_gradient_sync
from mgpu_pipe.parallel.gradients import clip_gradients, gradient_norm
from mgpu_pipe.parallel.randomness import step_seed
from mgpu_pipe.strategies.base import EngineStrategy, Materialise, NonFiniteStep, check_finite
from mgpu_pipe.topology import ParallelDims

__all__ = ["MeshStrategy", "NonFiniteStep"]


class MeshStrategy(EngineStrategy):
    """Runs whole optimizer steps on a mesh of processes.

    The process group exists already when the strategy is made. ``fp32`` data parallelism keeps whole weights and sums
    gradients by :class:`GradientReducer`; sharding and ``bf16`` go through FSDP2.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
        precision: ``fp32`` or ``bf16``.
        max_norm: largest global gradient norm, or None.
        bucket_mib: size of a gradient bucket.
        materialise: fills the parameters and buffers of a model that was built on the meta device, in place.
        dropout_seed: the run's seed, where the model drops anything out; None leaves the generators alone.
        stop_requested: whether this process was told to stop.
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
    ) -> None:
        super().__init__(dims, device)
        self._precision = precision
        self._max_norm = max_norm
        self._bucket_mib = bucket_mib
        self._materialise = materialise
        self._dropout_seed = dropout_seed
        self._stop_requested = stop_requested
        self._reducer: GradientReducer | None = None
        self._sharded: FSDPModule | None = None
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
        )

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
        """Split ``model`` over the mesh and fill its parameters. A collective call."""
        if self.dims.dp_shard > 1 or self._precision != "fp32":
            mesh = self.dims.device_mesh(self._device.type)["dp_replicate", "dp_shard"]
            if self._materialise is not None:
                self._materialise(model, self._device)
            self._sharded = apply_fully_shard(model, mesh, self._precision)
        else:
            if self._materialise is not None:
                self._materialise(model, self._device)
            if self.dims.data_parallel_size > 1:
                self._reducer = GradientReducer(model.parameters(), None, self._bucket_mib)
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    # -- one step -----------------------------------------------------------------------------------------------

    def run_step(self, window: StepWindow) -> StepResult:
        """Forward and backward of all micro-batches, reduction, norm, finite check and clipping (not the update).

        Raises:
            NonFiniteStep: on every rank alike, before the update.
        """
        objective = self.objective
        if self._dropout_seed is not None:
            at = self.dims.data_parallel_rank(self.global_rank)
            torch.manual_seed(step_seed(self._dropout_seed, window.step, at))
        if self._reducer is not None:
            # Here, not after the update: Lightning and its callbacks may have set gradients to None since.
            self._reducer.zero()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, micro_batch in enumerate(window.micro_batches):
            last = index == len(window.micro_batches) - 1
            if self._reducer is not None:
                self._reducer.start(last)
            elif self._sharded is not None:
                set_gradient_sync(self._sharded, last, self.dims.dp_shard > 1)
            loss = objective.micro_batch_loss(micro_batch)
            loss.backward(torch.full_like(loss, 1.0 / window.normalizer))
            loss_sum += loss.detach()
        return self._finish_step(window, loss_sum)

    def _finish_step(self, window: StepWindow, loss_sum: torch.Tensor) -> StepResult:
        used = self._reducer.finish() if self._reducer is not None else []
        stop = 1.0 if self._stop_requested() else 0.0
        # One small all-reduce tells every rank the loss, whether any is to stop, and which gradients exist.
        facts = torch.cat([loss_sum.reshape(1), torch.tensor([stop, *map(float, used)], device=self._device)])
        facts = self.sum_over_data(facts)
        unused = facts[2:] == 0
        norm = gradient_norm(self._parameters, self._device)
        # One copy to the host for all that it decides.
        scalars = torch.stack([facts[0] / window.normalizer, facts[1], norm, unused.sum().double()])
        loss, stopping, norm_value, num_unused = scalars.tolist()
        if self._reducer is not None and num_unused:
            self._reducer.drop(torch.nonzero(unused).flatten().tolist())
        check_finite(loss, norm_value, window)
        if self._max_norm is not None:
            clip_gradients(self._parameters, norm_value, self._max_norm)
        return StepResult(loss, norm_value, stopping > 0)

    def zero_gradients(self) -> None:
        """Free the gradients; the reducer's stay in its buckets and are cleared when the next window starts."""
        if self._reducer is None:
            for parameter in self._parameters:
                parameter.grad = None

    @torch.no_grad()
    def run_evaluation(self, window: StepWindow) -> torch.Tensor:
        objective = self.objective
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro_batch in window.micro_batches:
            total += objective.micro_batch_loss(micro_batch)
        return total

    # -- state --------------------------------------------------------------------------------------------------

    def model_pieces(self) -> list[Piece]:
        """This rank's parts of the weights, as live tensors."""
        self._settle()
        return named_tensor_pieces(self.objective.model.named_parameters())

    def optimizer_pieces(self) -> list[Piece]:
        """This rank's parts of the optimizer state, as live tensors."""
        self._settle()
        return optimizer_pieces(self.objective.model, self.optimizers[0])

    def gradient_pieces(self) -> list[Piece]:
        """This rank's parts of the gradients, as live tensors."""
        self._settle()
        named = ((n, p.grad) for n, p in self.objective.model.named_parameters() if p.grad is not None)
        return named_tensor_pieces(named)

    def _settle(self) -> None:
        """Back to the sharded fp32 parameters: a forward pass without backward leaves the compute copies in place."""
        if self._sharded is not None:
            reshard_all(self._sharded)
