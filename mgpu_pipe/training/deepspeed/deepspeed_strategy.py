"""The deepspeed engine: ZeRO-1, 2 and 3 as a Lightning Strategy, on CUDA and on the CPU.

Lightning's own DeepSpeedStrategy refuses the CPU. DeepSpeed is imported when a run sets up, and by no other engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from mgpu_pipe.checkpoint.live_tensors import restore_numbers
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.models.kernels.norms import add_up_in_fp32
from mgpu_pipe.models.weights.slices import FolderWeights
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.protocols import FeatureGatherer, gather_features
from mgpu_pipe.optim.gradients import CLIP_EPSILON, squared_norm
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.compile import compile_blocks
from mgpu_pipe.parallel.device_memory import ForwardMeter, storage_bytes, to_device
from mgpu_pipe.parallel.random_streams import step_seed
from mgpu_pipe.system.compat.deepspeed_private import skip_update
from mgpu_pipe.system.compat.lightning_private import after_closure
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.build_extension import load_extensions
from mgpu_pipe.training.deepspeed.deepspeed_config import deepspeed_config
from mgpu_pipe.training.deepspeed.swap_folder import claim
from mgpu_pipe.training.deepspeed.zero_build import (
    FrozenWeights,
    LossModule,
    Shards,
    check_settings,
    partition_model,
    prepare_deepspeed,
    values_of,
    whole_values,
    zero_engine,
)
from mgpu_pipe.training.deepspeed.zero_stages import SwappedState, ZeroThreeState, ZeroTwoState
from mgpu_pipe.training.deepspeed.zero_state import ZeroState
from mgpu_pipe.training.step import VOTES, StepVotes
from mgpu_pipe.training.strategy import EngineOptions, EngineStrategy, StoredState

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MicroBatch = dict[str, torch.Tensor]
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DeepSpeedStrategy(EngineStrategy):
    """Runs whole optimizer steps through DeepSpeed's engine.

    ZeRO-1 reduces gradients once a step batch, ZeRO-2 and 3 in every micro-batch. The norm, the finite check and
    clipping are this project's, between the last backward pass and the update.

    Args:
        dims: data-parallel sizes only.
        device: this process's device.
        settings: the DeepSpeed configuration (:mod:`.deepspeed_config`).
        precision: ``fp32`` or ``bf16``.
        seed: keys the initial values that ZeRO-3 draws part by part, where ``materialise`` is given and not
            :class:`FolderWeights`, whose folder it reads part by part.
        activation_checkpointing: ``none``, ``full`` or ``selective``.
        compile_model: compile each block; ZeRO-1 and 2 only.
        engine_options: see :class:`~mgpu_pipe.training.strategy.EngineOptions`.
    """

    strategy_name = "mgpu_deepspeed"

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        settings: Mapping[str, Any],
        *,
        precision: str = "fp32",
        seed: int = 0,
        activation_checkpointing: Literal["none", "full", "selective"] = "none",
        compile_model: bool = False,
        **engine_options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(dims, device, **engine_options)
        self.settings = dict(settings)
        self.stage = int(self.settings["zero_optimization"]["stage"])
        self._precision = precision
        self._seed = seed
        self._activation_checkpointing = activation_checkpointing
        self._compile_model = compile_model
        self._engine: DeepSpeedEngine | None = None
        self._state: ZeroState | None = None
        self._initial: Shards = {}
        self._frozen: FrozenWeights | None = None
        self._used: dict[str, float] = {}
        self._unused: list[str] = []
        self._like: MicroBatch | None = None
        self._first_step: int | None = None
        self._skips = False
        """The step at hand leaves the weights as they are."""

    @classmethod
    def run_options(cls, config: RunConfig, dims: ParallelDims) -> dict[str, Any]:
        plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
        return {
            "settings": deepspeed_config(config.strategy, config.precision, config.trainer, plan),
            "precision": resolve_precision(config.precision, config.trainer),
            "seed": config.seed,
            "activation_checkpointing": config.strategy.activation_checkpointing,
            "compile_model": config.model.compile is True,
        }

    # -- assembling ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> DeepSpeedEngine:
        assert self._engine is not None, "the engine exists once training is set up"
        return self._engine

    @property
    def state(self) -> ZeroState:
        assert self._state is not None, "the state exists once training is set up"
        return self._state

    @property
    def frozen_weights(self) -> FrozenWeights:
        assert self._frozen is not None, "the engine exists once training is set up"
        return self._frozen

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        objective = self.objective
        prepare_deepspeed(self._device)
        check_settings(self.settings)
        self._prepare_swapping()
        self.parallelise(objective.model)
        self.model = objective
        self.setup_optimizers(trainer)
        (optimizer,) = self.optimizers
        self._start_engine(objective, optimizer)
        if self.state.optimizer is not optimizer:
            # DeepSpeed makes a new Adagrad, whose constructor makes the state, and forgets what its groups were.
            self.state.optimizer.param_groups[:] = optimizer.param_groups
        self.optimizers = [self.state.optimizer]
        self.setup_precision_plugin()

    def _prepare_swapping(self) -> None:
        """Load the file access of ``strategy.offload=nvme`` and make this run's folder. A collective call."""
        zero = self.settings["zero_optimization"]
        place = zero.get("offload_optimizer", {})
        if place.get("device") == "nvme":
            load_extensions()
            token = self.broadcast(secrets.token_hex(8))
            claimed = {**place, "nvme_path": str(claim(Path(place["nvme_path"]), token))}
            self.settings["zero_optimization"] = {**zero, "offload_optimizer": claimed}

    def parallelise(self, model: nn.Module) -> None:
        """Fill the parameters of ``model``; under ZeRO-3 only this rank's part of each exists afterwards."""
        dtype = COMPUTE_DTYPES[self._precision]
        add_up_in_fp32(model)
        apply_activation_checkpointing(model, self._activation_checkpointing)
        if self._compile_model:
            compile_blocks(model)
        if self.stage == 3:
            folder = self._materialise if isinstance(self._materialise, FolderWeights) else None
            is_random = self._materialise is not None and folder is None
            self._initial = partition_model(
                model, self.settings, self._device, dtype, seed=self._seed if is_random else None, folder=folder
            )
            return
        if self._materialise is not None:
            self._materialise(model, self._device)
        if dtype != torch.float32:
            self._initial = whole_values(model)

    def _start_engine(self, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
        model = objective.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._engine = zero_engine(LossModule(objective), optimizer, self.settings)
        zero = self._engine.optimizer
        kind = ZeroTwoState if self.stage < 3 else SwappedState if zero.swap_optimizer else ZeroThreeState
        self._state = kind(zero, names, dist.get_rank())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._used[name] = 0.0
                parameter.register_post_accumulate_grad_hook(partial(self._mark_used, name))
        self._frozen = FrozenWeights(model)
        self._take_initial_values()

    def _take_initial_values(self) -> None:
        """The fp32 masters' initial values: DeepSpeed makes them from the weights that it has rounded."""
        if not self._initial:
            return
        with torch.no_grad():
            for f in self.state.fragments:
                f.view_in(self.state.values(f.group)[0]).copy_(values_of(self._initial, f.name, f.start, f.numel))
            self.state.weights_written()
        self.frozen_weights.keep(self._initial)
        self._initial = {}

    def _mark_used(self, name: str, parameter: torch.Tensor) -> None:
        self._used[name] = 1.0

    # -- one step -----------------------------------------------------------------------------------------------

    def begin_step(self, step_batch: StepBatch) -> list[MicroBatch]:
        self._like = step_batch.micro_batches[0]
        if self._dropout_seed is not None:
            torch.manual_seed(step_seed(self._dropout_seed, step_batch.step, self.global_rank))
        self.state.clear_gradients()
        self._skips = False
        self._used = dict.fromkeys(self._used, 0.0)
        return step_batch.micro_batches

    def forward_backward(self, parts: Sequence[MicroBatch], step_batch: StepBatch) -> torch.Tensor | None:
        # DeepSpeed averages gradients over the processes; the sum over all tokens is what is wanted.
        scale = self.dims.data_parallel_size / step_batch.loss_divisor
        gather_features(self.objective, parts, len(parts), self)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, part in enumerate(parts):
            if self.micro_batch_stop.should_leave(index, len(parts)):
                return None
            last = index == len(parts) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            loss = self._forward(part)
            self.engine.backward(loss.float() * scale, scale_wrt_gas=False)
            loss_sum += loss.detach()
            if last:
                self.state.gradients_reduced()
            self._note_gradients(step_batch)
        return loss_sum

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The micro-batch's loss; the first one's activations are measured."""
        if "activations" in self._memory or self._compile_model:
            return cast(torch.Tensor, self.engine(micro_batch))
        with ForwardMeter(self._device) as meter:
            loss = cast(torch.Tensor, self.engine(micro_batch))
        self._memory["activations"] = max(0, meter.left_bytes())
        return loss

    def _note_gradients(self, step_batch: StepBatch) -> None:
        """Record the most gradient memory between the passes of the first step batch: ZeRO-1 keeps whole gradients
        until the last.
        """
        if self._first_step is None:
            self._first_step = step_batch.step
        if step_batch.step == self._first_step:
            size = storage_bytes(self.state.held_gradients(), self._device.type)
            self._memory["gradients"] = max(self._memory.get("gradients", 0), size)

    def reduce_gradients(
        self, loss_sum: torch.Tensor, votes: StepVotes, step_batch: StepBatch
    ) -> tuple[float, float, StepVotes]:
        gradients = [gradient for _, gradient in self.state.gradients()]
        if gradients and gradients[0].device != self._device and self._device.type == "cuda":
            # ZeRO-1 and 2 copy offloaded gradients to pinned memory without waiting, and the norm is of the host's.
            torch.cuda.synchronize(self._device)  # whatever stream of the backward pass copied
        squares = squared_norm(gradients).to(self._device) if gradients else torch.zeros_like(loss_sum)
        # One small all-reduce of the loss, the squared norm, the votes, and which gradients exist.
        values = to_device(torch.tensor([*votes.as_list(), *self._used.values()], dtype=torch.float64), self._device)
        sums = self.sum_over_data(torch.cat([loss_sum.reshape(1), squares.reshape(1), values])).tolist()
        flags = sums[2 + VOTES :]
        self._unused = [name for name, used in zip(self._used, flags, strict=True) if not used]
        return sums[0] / step_batch.loss_divisor, sums[1] ** 0.5, StepVotes.from_sums(sums[2 : 2 + VOTES])

    def drop_gradients(self) -> None:
        self._skips = True

    def clip(self, gradient_norm: float) -> None:
        if self._max_norm is not None and gradient_norm + CLIP_EPSILON > self._max_norm:
            self.state.clip(self._max_norm / (gradient_norm + CLIP_EPSILON))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's hooks, then DeepSpeed's update."""
        result = closure()
        after_closure(self, self.objective, optimizer)
        self.before_writing()
        if not self.step_counts:
            skip_update(self.state.zero, self.engine.step)
            return result
        with self.average.follow(self.state.optimizer, self.state.masters()):
            if self._skips:
                skip_update(self.state.zero, self.engine.step)
            else:
                self.state.update(self.engine.step, self._unused)
        return result

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        try:
            with self.average.in_place(self.state.optimizer, self.state.masters()):
                self.state.weights_written()
                yield
        finally:
            self.state.weights_written()

    def zero_gradients(self) -> None:
        """DeepSpeed has cleared them with the update."""

    @torch.no_grad()
    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        micro_batches = self._pad(step_batch.micro_batches)
        gather_features(self.objective, micro_batches, len(step_batch.micro_batches), self)
        for micro_batch in micro_batches:
            total = total + self.engine(micro_batch)
        return total

    def _pad(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Pad all ranks to equally many micro-batches, without targets; ZeRO-3 and gathering losses need it."""
        together = self.stage == 3 or isinstance(self.objective, FeatureGatherer) or self.objective.gathers
        if not together or self.dims.data_parallel_size == 1:
            return micro_batches
        count = torch.tensor(len(micro_batches), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        missing = int(count) - len(micro_batches)
        if not missing:
            return micro_batches
        like = micro_batches[-1] if micro_batches else self._like
        assert like is not None, "an evaluation follows a training step"
        return [*micro_batches, *[self.objective.batch_spec.without_targets(like)] * missing]

    @property
    def holds_whole_model(self) -> bool:
        return self.stage < 3

    # -- state --------------------------------------------------------------------------------------------------

    def model_shards(self) -> list[LocalShard]:
        return [*self.state.master_shards(), *self.frozen_weights.shards()]

    def optimizer_shards(self) -> list[LocalShard]:
        return self.state.optimizer_shards()

    def gradient_shards(self) -> list[LocalShard]:
        return self.state.gradient_shards(self._unused)

    def create_optimizer_state(self, stored: StoredState, weights: Mapping[str, torch.dtype]) -> None:
        self.state.create_optimizer_state(stored, weights)

    def shards_written(self) -> None:
        restore_numbers(self.state.optimizer)
        self.state.weights_written()
        self.frozen_weights.update_weights()

    def memory_parts(self) -> dict[str, int]:
        """Bytes this rank keeps on its device of weights, gradients and optimizer state, and of activations.

        Weights count with their fp32 masters; gradients are the most that the first step batch's backward passes left
        behind; activations what the first forward pass left. What is offloaded is not counted.
        """
        kind = self._device.type
        return {
            "weights": storage_bytes([*self.state.held_weights(), *self.frozen_weights.resident_tensors()], kind),
            "optimizer": storage_bytes(self.state.held_state(), kind),
            **self._memory,
        }
