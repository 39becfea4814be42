"""Base class of every engine's strategy: training, checkpoints, verification, and the hooks that Lightning needs."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import ClusterEnvironment
from pytorch_lightning.strategies import ParallelStrategy
from typing_extensions import Self

from mgpu_pipe.checkpoint.live_tensors import create_optimizer_state, gradient_shards, model_shards, optimizer_shards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import Objective, StepResult
from mgpu_pipe.objectives.sample_group import ProcessSamples
from mgpu_pipe.optim.gradients import SpikeGuard
from mgpu_pipe.optim.moving_average import WeightAverage, on_local_shards
from mgpu_pipe.parallel.device_memory import to_device
from mgpu_pipe.parallel.parallelize import Fill
from mgpu_pipe.system.compat.lightning_private import after_closure
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.step import MicroBatchStop, StepEngine, run_step


class ExistingWorld(ClusterEnvironment):
    """Ranks and sizes of the default process group; Lightning starts no process and picks no port."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        return dist.is_available() and dist.is_initialized()

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Keep the process group's size."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Keep the process group's rank."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))


StoredState = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of every optimizer tensor of a checkpoint, by its name ``<parameter>/<state key>``."""


@dataclass(frozen=True)
class SamplingForward:
    """The forward pass of a model whose ranks generate text together, instead of the model's own.

    Attributes:
        forward: takes what transformers' ``generate()`` passes, of whole texts or, with a cache, of new tokens; see
            :meth:`.TextGenerator.sampling_batch`. It returns an object with ``logits``: those of the last position, or
            of ``logits_to_keep`` positions, 0 for all.
        takes_cache: whether it keeps keys and values of earlier tokens.
    """

    forward: Callable[..., Any]
    takes_cache: bool

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.forward(*args, **inputs)


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of every engine's constructor."""

    max_norm: float | None
    """Largest global gradient norm, or None."""
    materialise: Fill | None
    """Fills the parameters and buffers of a model that was built on the meta device, in place; None for a model whose
    weights were loaded."""
    dropout_seed: int | None
    """The run's seed, where the model drops anything out; None leaves the generators alone."""
    stop_requested: Callable[[], bool]
    """Whether this process was asked to stop."""


class EngineStrategy(StepEngine, ParallelStrategy, ProcessSamples):
    """Base of the strategies that run whole optimizer steps; the process group exists already when one is made.

    A subclass splits the model (:meth:`parallelise`), runs the parts of a step (:class:`.step.StepEngine`) and an
    evaluation (:meth:`run_evaluation`). Its part of the state are local shards in the coordinates of the unsharded
    model. All ranks make one alike, a collective call.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
        max_norm, materialise, dropout_seed, stop_requested: see :class:`EngineOptions`.
    """

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        *,
        max_norm: float | None = None,
        materialise: Fill | None = None,
        dropout_seed: int | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(cluster_environment=ExistingWorld())
        self.dims = dims
        self._device = device
        self._max_norm = max_norm
        self._materialise = materialise
        self._dropout_seed = dropout_seed
        self._memory: dict[str, int] = {}
        """Bytes measured in the first step, by what they are for."""
        self.micro_batch_stop = MicroBatchStop(stop_requested)
        self.average = WeightAverage()
        """Average of the weights, kept in the optimizer's state; set by whoever makes the strategy."""
        self.save_due: Callable[[], bool] = lambda: False
        """Whether a save is due on this rank at a step's end; set by whoever makes the strategy."""
        self.before_writing: Callable[[], None] = lambda: None
        """Called before weights or optimizer state are written, which a save may still read; set like ``save_due``."""
        self.step_counts = True
        """The current step batch has a trained token."""
        self.spike_guard = SpikeGuard()
        """Guard against spikes of the gradient norm; set by whoever makes the strategy."""

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        dims: ParallelDims,
        device: torch.device,
        *,
        materialise: Fill | None,
        dropout_seed: int | None,
        stop_requested: Callable[[], bool],
    ) -> Self:
        """Build the strategy of a run; a subclass may read its own keys here. See :class:`EngineOptions`."""
        return cls(
            dims,
            device,
            max_norm=config.trainer.gradient_clip_val,
            materialise=materialise,
            dropout_seed=dropout_seed,
            stop_requested=stop_requested,
            **cls.run_options(config, dims),
        )

    @classmethod
    def run_options(cls, config: RunConfig, dims: ParallelDims) -> dict[str, Any]:
        """Further arguments of this engine's constructor for a run."""
        return {}

    # -- what training, checkpoints and verification ask --------------------------------------------------------

    @property
    def holds_whole_model(self) -> bool:
        """Whether one rank alone can run the trained model: no part of it is on another rank only."""
        return not self.dims.cuts_the_model

    @property
    def objective(self) -> Objective:
        module = self.lightning_module
        assert isinstance(module, Objective), "strategies train subclasses of mgpu_pipe.objectives.base.Objective"
        return module

    @abstractmethod
    def parallelise(self, model: torch.nn.Module) -> None:
        """Split ``model`` over the processes and fill its parameters. A collective call."""

    def run_step(self, step_batch: StepBatch) -> StepResult:
        """Run a step batch up to its update (:func:`mgpu_pipe.training.step.run_step`); NonFiniteStep on all ranks
        alike."""
        return run_step(self, step_batch)

    @abstractmethod
    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        """This process's sums over the step batch's micro-batches, without gradients; see
        :meth:`Objective.evaluation_sums`. A float64 zero where it has none.
        """

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """A context in which the weights are the evaluated ones: their average where the run says so."""
        if not self.average.evaluated:
            yield
            return
        self.before_writing()
        with self._average_in_place():
            yield

    @contextmanager
    def _average_in_place(self) -> Iterator[None]:
        """A context in which every forward pass uses the averaged weights."""
        self.free_gathered()
        with self.average.in_place(self.optimizers[0]):
            yield
            self.free_gathered()

    def zero_gradients(self) -> None:
        self.objective.zero_grad()

    def free_gathered(self) -> None:
        """Free the weights that a forward pass without a backward pass leaves gathered."""

    def model_shards(self) -> list[LocalShard]:
        """This rank's parts of the (master) weights, as live tensors."""
        self.free_gathered()
        return model_shards(self.objective.model)

    def optimizer_shards(self) -> list[LocalShard]:
        """This rank's parts of the optimizer state, as live tensors."""
        self.free_gathered()
        return optimizer_shards(self.objective.model, self.optimizers[0])

    def gradient_shards(self) -> list[LocalShard]:
        """This rank's parts of the gradients, as live tensors."""
        self.free_gathered()
        return gradient_shards(self.objective.model)

    def create_optimizer_state(self, stored: StoredState, weights: Mapping[str, torch.dtype]) -> None:
        """Give the optimizer the (empty) state tensors that a checkpoint holds values for.

        Args:
            weights: type of every weight of the checkpoint by its name.
        """
        create_optimizer_state(self.objective.model, self.optimizers[0], stored, weights)

    def step_metrics(self) -> dict[str, float]:
        """Further metrics of the steps since the last row, by column. A collective call."""
        return {}

    def sampling_forward(self) -> SamplingForward | None:
        """The forward pass that generates text, run by all ranks together; None for the model's own."""
        return None

    def state_entries(self) -> dict[str, Any]:
        """Entries of this strategy in ``state.json``, equal on every rank."""
        return dict(self.spike_guard.state())

    def restore_entries(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_entries` from a checkpoint's state, which may be of another precision."""
        self.spike_guard.restore(state.get("gradient_norms", ()))

    def memory_parts(self) -> dict[str, int]:
        """Bytes this rank keeps, by what they are for; parts that are not known are left out."""
        return {}

    def shards_written(self) -> None:
        """Update copies of the local shards after they were written into. A collective call."""

    @property
    def evaluation_follows(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.val_check_batch == 1

    # -- what Lightning asks ------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Parallelise the model, then build the optimizer of its parameters."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.parallelise(self.objective.model)
        self.model = self.objective
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizer; its groups keep the peak learning rate as ``initial_lr``."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning's hooks, then the update, on this rank's shards."""
        result = closure()
        after_closure(self, self.objective, optimizer)
        if not self.step_counts:
            return result
        self.before_writing()
        with on_local_shards(optimizer), self.average.follow(optimizer):
            optimizer.step()
        return result

    @property
    def root_device(self) -> torch.device:
        return self._device

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def model_to_device(self) -> None:
        """Parameters are created where they belong."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, StepBatch) and self._device.type != "cpu":
            needed = self.needed_fields()
            for index, micro_batch in enumerate(batch.micro_batches):
                wanted = {name: value for name, value in micro_batch.items() if name in needed}
                wanted |= self.objective.host_inputs(micro_batch)
                moved = {name: to_device(value, self._device) for name, value in wanted.items()}
                batch.micro_batches[index] = moved | self.known_on_host(micro_batch)
        return batch

    def needed_fields(self) -> tuple[str, ...]:
        """The fields of a micro-batch that this rank computes with."""
        return tuple(self.objective.batch_spec.fields)

    def known_on_host(self, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of a micro-batch that stay in host memory, where a step needs them."""
        return {}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or self.world_size == 1:
            return tensor
        mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        op = dist.ReduceOp.SUM if mean or reduce_op == "sum" else reduce_op
        result = tensor.to(self._device).clone()
        dist.all_reduce(result, op=op, group=group)
        return result / self.world_size if mean else result

    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send a JSON value from ``src`` to all; other types are refused, since nothing here is pickled."""
        if self.world_size == 1:
            return obj
        payload = json.dumps(obj).encode() if self.global_rank == src else b""
        size = torch.tensor([len(payload)], device=self._device)
        dist.broadcast(size, src)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if self.global_rank == src:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, src)
        return json.loads(bytes(data.tolist()))

    def teardown(self) -> None:
        """Leave the model where it is: it is evaluated, sampled from or saved after the fit."""
        assert self.accelerator is not None
        self.accelerator.teardown()
