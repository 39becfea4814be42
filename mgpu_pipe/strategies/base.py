"""What every engine's strategy is to training, checkpoints and verification, and the plumbing Lightning asks for."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ParallelStrategy
from typing_extensions import Self

from mgpu_pipe.checkpoint.adapters import create_optimizer_state
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.base import Objective, StepResult
from mgpu_pipe.parallel.ring import pass_on
from mgpu_pipe.parallel.spike_guard import SpikeGuard
from mgpu_pipe.parallel.tensor_collectives import all_gather_parts, reduce_scatter_parts
from mgpu_pipe.parallel.to_device import to_device
from mgpu_pipe.parallel.weight_average import WeightAverage
from mgpu_pipe.strategies.world import ExistingWorld
from mgpu_pipe.topology import ParallelDims

Materialise = Callable[[Any, torch.device], object]
StoredState = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of every optimizer tensor of a checkpoint, by its name ``<parameter>/<state key>``."""


class NonFiniteStep(Exception):
    """The loss or the gradient norm of a step is not finite; says which, and holds the step batch."""

    def __init__(self, what: str, step_batch: StepBatch) -> None:
        super().__init__(f"{what} at step {step_batch.step + 1}")
        self.what, self.step_batch = what, step_batch


class EngineStrategy(ParallelStrategy):
    """Base of the strategies that run whole optimizer steps; the process group exists already when one is made.

    A subclass splits the model (:meth:`parallelise`), runs steps and evaluation, and shows its part of the state as
    local shards in the coordinates of the unsharded model.

    Args:
        dims: the sizes of every axis.
        device: this process's device.
    """

    def __init__(self, dims: ParallelDims, device: torch.device) -> None:
        super().__init__(cluster_environment=ExistingWorld())
        self.dims = dims
        self._device = device
        self.average = WeightAverage()
        """Of the weights, kept in the optimizer's state; whoever makes the strategy says how."""
        self.save_due: Callable[[], bool] = lambda: False
        """Whether this rank finds, at a step's end, that it is time for a save. As above."""
        self.before_writing: Callable[[], None] = lambda: None
        """Called before weights or the optimizer's state are written: a save may still be reading them. As above."""
        self.spike_guard = SpikeGuard()
        """As above."""

    @classmethod
    @abstractmethod
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
        """Build the strategy of a run; a subclass reads its own keys here.

        Args:
            materialise: fills the parameters and buffers of a model that was built on the meta device, in place;
                None for a model whose weights were loaded.
            dropout_seed: the run's seed, where the model drops anything out; None leaves the generators alone.
            stop_requested: whether this process was told to stop.
        """

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

    @abstractmethod
    def run_step(self, step_batch: StepBatch) -> StepResult:
        """Forward and backward of all micro-batches, reduction, norm, finite check and clipping (not the update).

        Raises:
            NonFiniteStep: on every rank alike, before the update.
        """

    @abstractmethod
    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        """This process's sums over the step batch's micro-batches, without gradients; see
        :meth:`Objective.evaluation_sums`. A float64 zero where it has none.
        """

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within it the weights are those that evaluation is of: their average, where the run says so."""
        if not self.average.evaluated:
            yield
            return
        self.before_writing()
        with self._average_in_place():
            yield

    @abstractmethod
    def _average_in_place(self) -> AbstractContextManager[None]:
        """Within it every forward pass is of the average."""

    @abstractmethod
    def zero_gradients(self) -> None:
        """Clear all gradients."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place; of those that share samples, all but one add zeros.
        Collective.
        """
        if self.dims.world_size > 1:
            dist.all_reduce(values)
        return values

    @torch.no_grad()
    def gather_samples(self, features: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        """Features of the samples of all data-parallel processes in order, and the index of this process's first.
        Collective.

        Args:
            features: by name, a row for each of this process's samples, equal on processes that share them; any number.
        """
        size, rank = self.dims.data_parallel_size, self.dims.data_parallel_rank(self.global_rank)
        one = next(iter(features.values()))
        own = len(one) if self.counts_its_samples else 0
        counts = torch.zeros(size, dtype=torch.int64, device=one.device)
        counts[rank] = own
        ends = self.sum_over_data(counts).cumsum(0).tolist()
        first, even = ends[rank] - len(one), ends == [ends[0] * (1 + at) for at in range(size)]
        if even and (world := self._apart):
            return {name: all_gather_parts(rows, world).flatten(0, 1) for name, rows in features.items()}, first
        whole = {name: rows.new_zeros(ends[-1], *rows.shape[1:]) for name, rows in features.items()}
        for name, rows in features.items():
            whole[name][first : first + own] = rows[:own]
            self.sum_over_data(whole[name])
        return whole, first

    @torch.no_grad()
    def sum_of_own(self, values: torch.Tensor, own: slice) -> torch.Tensor:
        """Of the processes' sum of ``values``, a row for each of all samples, this process's rows. Collective; the
        processes have equally many samples."""
        world = self._apart
        return reduce_scatter_parts(values, world) if world else self.sum_over_samples(values)[own]

    @property
    def ring(self) -> int:
        """Processes that :meth:`pass_on` goes round; 1 where some share samples."""
        return self.dims.world_size if self._apart else 1

    @torch.no_grad()
    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        """What the process before this one passes on while this one passes on ``values``, of the same shape.
        Collective."""
        assert self._apart is not None
        return pass_on(values, self._apart)()

    @property
    def _apart(self) -> dist.ProcessGroup | None:
        """All processes, where each has samples that no other has."""
        return dist.group.WORLD if self.dims.world_size == self.dims.data_parallel_size > 1 else None

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of what each process says of its samples, of which no other that shares them is counted. Collective."""
        return self.sum_over_data(values if self.counts_its_samples else torch.zeros_like(values))

    @property
    def counts_its_samples(self) -> bool:
        """Whether this process counts its samples; exactly one of those that share them does."""
        return True

    @abstractmethod
    def model_shards(self) -> list[LocalShard]:
        """This rank's parts of the (master) weights, as live tensors."""

    @abstractmethod
    def optimizer_shards(self) -> list[LocalShard]:
        """This rank's parts of the optimizer state, as live tensors."""

    @abstractmethod
    def gradient_shards(self) -> list[LocalShard]:
        """This rank's parts of the gradients, as live tensors."""

    def create_optimizer_state(self, stored: StoredState, weights: Mapping[str, torch.dtype]) -> None:
        """Give the optimizer the (empty) state tensors that a checkpoint holds values for.

        Args:
            weights: type of every weight of the checkpoint by its name.
        """
        create_optimizer_state(self.objective.model, self.optimizers[0], stored, weights)

    def step_metrics(self) -> dict[str, float]:
        """Further metrics of the steps since the last row, by column. A collective call."""
        return {}

    def sampling_forward(self) -> Callable[..., Any] | None:
        """The forward pass that generates text, run by all ranks together; None for the model's own.

        It takes whole texts, as :meth:`Objective.sampling_batch` does, and returns an object with ``logits``: those of
        the last position, or of ``logits_to_keep`` positions, 0 for all.
        """
        return None

    def sampled(self) -> None:
        """Called after text was generated: drops what a forward pass without a backward pass leaves in place."""

    def state_entries(self) -> dict[str, Any]:
        """What ``state.json`` keeps of this strategy, equal on every rank."""
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
        """Whether an evaluation follows the current step. A stop leaves such a step uncounted: the
        evaluation may outlast ``launch.stop_timeout``, and a resume, which begins after the step, would never make it.
        """
        module = self.lightning_module
        return module is not None and module.trainer.val_check_batch == 1

    # -- what Lightning asks ------------------------------------------------------------------------------------

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
        """What goes with a micro-batch to the device and stays in host memory, where a step needs it."""
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


def check_finite(loss: float, gradient_norm: float, step_batch: StepBatch) -> None:
    """Raise :class:`NonFiniteStep` unless both numbers, which are the same on every rank, are finite."""
    for value, what in ((loss, "the loss"), (gradient_norm, "the gradient norm")):
        if value - value != 0.0:
            raise NonFiniteStep(what, step_batch)
