"""Base class of objectives: a LightningModule whose batch is a step batch and whose strategy runs the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import pytorch_lightning as pl
import torch
from typing_extensions import Self

from mgpu_pipe.config.objective import Description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import Prepared, SampleSet
from mgpu_pipe.data.step_batch import BatchSpec, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.kernels.packed_attention import document_starts
from mgpu_pipe.objectives.packed_text import STARTS, forward_kwargs, packed_text, random_packed_text, wants_starts
from mgpu_pipe.objectives.protocols import FeatureGatherer
from mgpu_pipe.objectives.sample_group import Batch as Batch
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.text_keys import CAUSAL_LM
from mgpu_pipe.parallel.random_streams import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class StepResult:
    """Result of one optimizer step, equal on every rank."""

    loss: float
    """Global loss: sum over all valid tokens divided by their number."""
    gradient_norm: float
    """Global 2-norm before clipping."""
    stop: bool
    """A rank received a stop request; all ranks stop here."""
    skipped: bool = False
    """No rank updates: gradients overflowed under a loss scale, the gradient norm is a spike, or nothing counts."""
    abandoned: bool = False
    """All ranks abandoned the step because of a stop. It leaves no trace; a resume runs it again."""

    save: bool = False
    """A save is due by the clock of some rank."""

    @classmethod
    def nothing_counts(cls, stop: bool, save: bool) -> StepResult:
        """Result of a step without a trained token: no loss, weights and optimizer state unchanged."""
        return cls(math.nan, 0.0, stop, skipped=True, save=save)

    @classmethod
    def abandoned_step(cls) -> StepResult:
        """Result of an abandoned step."""
        return cls(math.nan, math.nan, stop=True, abandoned=True)


class StepStrategy(SampleGroup, Protocol):
    """Methods of the strategy plugin that an objective calls."""

    def run_step(self, step_batch: StepBatch) -> StepResult:
        """Runs forward and backward of every micro-batch, reduction, norm, finite check and clipping."""

    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        """Sum of :meth:`Objective.evaluation_sums` over this process's micro-batches, without gradients."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the data-parallel processes."""

    def zero_gradients(self) -> None:
        """Clear all gradients."""


@dataclass
class Reference:
    """Losses of some samples, computed in the plainest way."""

    loss_sum: torch.Tensor
    """Sum over the valid units."""
    auxiliary_sum: torch.Tensor | float = 0.0
    """Sum of an additive auxiliary loss over samples. It is averaged over the step's samples, outside the loss."""


Forward = Callable[..., Any]
LearningRate = Callable[[int], float]
"""Factor of the peak learning rate at a zero-based optimizer step."""


def step_generator(seed: int, step: int) -> torch.Generator:
    """Generator of the random samples of one step of :mod:`mgpu_pipe.verify`."""
    return torch.Generator().manual_seed(step_seed(seed, step, -1))


def draw_integers(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """Random integers from ``low`` to below ``high``, int64."""
    return torch.randint(low, high, shape, generator=generator)


class Objective(pl.LightningModule, ABC):
    """Base class of objectives. A subclass defines :meth:`micro_batch_loss`, and the methods of the protocols in
    :mod:`mgpu_pipe.objectives.protocols` and :mod:`mgpu_pipe.parallel.parallelize` that fit it.

    Args:
        model: the network; its ``named_parameters()`` are the names in checkpoints.
        optimizer_factory: builds the optimizer of the (already parallelised) model.
        learning_rate: the schedule, a pure function of the step; a resume needs no state for it.

    Attributes:
        evaluated: the metrics of the last evaluation, by key.
        evaluation_details: other findings of the last evaluation, for the summary and the report; JSON.
        gathers: whether :meth:`micro_batch_loss` gathers from other ranks; then all ranks call it equally often.
        description: the torch-free description: keys, metrics, families, refused axes.
    """

    description: ClassVar[Description] = CAUSAL_LM
    num_sums: ClassVar[int] = 1
    """Length of :meth:`evaluation_sums`."""

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self._optimizer_factory = optimizer_factory
        self._learning_rate = learning_rate
        self._optimizer: Any = None
        self._sums: torch.Tensor | None = None
        self.evaluated: dict[str, float] = {}
        self.evaluation_details: dict[str, Any] = {}
        self.gathers = False

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        """Builds the objective of a run."""
        return cls(model, optimizer_factory, learning_rate, *cls.arguments(config.objective))

    @classmethod
    def arguments(cls, keys: Any) -> tuple[Any, ...]:
        """Further arguments of the constructor, from ``objective.*`` of the run. Default: none."""
        return ()

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        """Samples to train and evaluate on: the data's samples, unchanged or changed as they are read."""
        return samples

    @abstractmethod
    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the losses of one micro-batch's valid items, a scalar; the strategy divides it.

        Its gradient may include an additive auxiliary loss; its value does not.
        """

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random samples of one step of :mod:`mgpu_pipe.verify`, from (seed, step) alone.

        Their numbers of valid units differ.
        """
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return random_packed_text(step_generator(seed, step), step, samples, seq_len, vocabulary, packed)

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """Plain computation that strategies are compared with; shares no code with :meth:`micro_batch_loss`.

        Args:
            forward: calls the whole model of one process with keyword arguments and returns its output.
            model: that model, for its configuration.

        Raises:
            BadInputError: the objective defines none, so it cannot be verified.
        """
        name = type(self).__name__
        raise BadInputError(f"{name} defines no reference_loss, which verify compares with; define it")

    def of_data(self, prepared: Prepared) -> None:
        """Called with the data before training or an evaluation. Stores what the evaluation needs of it."""

    def start_step(self, step_batch: StepBatch) -> None:
        """Called before the micro-batches of a training step. Stores what their losses need of the step."""

    @property
    def batch_spec(self) -> BatchSpec:
        """Fields of a micro-batch. Default: packed text."""
        return packed_text()

    def host_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs of the forward pass to compute on the host, without a host sync; added to the micro-batch."""
        documents = self.batch_spec.documents
        if documents is None or not wants_starts(self.model):
            return {}
        return {STARTS: document_starts(batch[documents])}

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass for a micro-batch."""
        return forward_kwargs(cast("PreTrainedModel", self.model), batch)

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sums that evaluation adds over micro-batches: losses first, then metrics; float64, (num_sums,)."""
        return self.micro_batch_loss(batch).reshape(1)

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """New :attr:`evaluation_details`, from the sums over the held-out samples."""
        return {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self._optimizer_factory(self.model))

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        """One optimizer step."""
        strategy = cast(StepStrategy, self.trainer.strategy)
        self.start_step(step_batch)
        result = strategy.run_step(step_batch)
        if self._optimizer is None:
            self._optimizer = self.optimizers()
        if result.abandoned:
            strategy.zero_gradients()
            return {"result": result, "lr": self._optimizer.param_groups[0]["lr"]}
        factor = self._learning_rate(step_batch.step)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor if step_batch.step >= group.get("frozen_until", 0) else 0.0
        if result.skipped:
            # A step without gradients changes nothing. Lightning counts it, so the run ends on time.
            strategy.zero_gradients()
        self._optimizer.step()
        strategy.zero_gradients()
        return {"result": result, "lr": self._optimizer.defaults["lr"] * factor}

    def on_validation_start(self) -> None:
        self._sums = torch.zeros(1 + self.num_sums, dtype=torch.float64, device=self.trainer.strategy.root_device)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        assert self._sums is not None
        strategy = cast(StepStrategy, self.trainer.strategy)
        self._sums[:-1] += strategy.run_evaluation(step_batch)
        # Every rank has the global count of the step batch, so it is not summed over ranks.
        self._sums[-1] += step_batch.loss_denominator

    def on_validation_epoch_end(self) -> None:
        assert self._sums is not None
        strategy = cast(StepStrategy, self.trainer.strategy)
        last = self.last_sums(strategy) if isinstance(self, FeatureGatherer) else 0.0
        sums = [*(strategy.sum_over_data(self._sums[:-1]) + last).tolist(), float(self._sums[-1])]
        self.evaluated, self.evaluation_details = dict(self.description.measured(sums)), self.findings(sums)
        for key, value in self.evaluated.items():
            self.log(key, torch.tensor(value, dtype=torch.float64), logger=False, batch_size=1)


class KeyedObjective(Objective):
    """Base class of objectives that read their keys as they compute.

    Attributes:
        keys: ``objective.*`` of the run; a subclass narrows its type.
    """

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: Any) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self.keys = keys

    @classmethod
    def arguments(cls, keys: Any) -> tuple[Any, ...]:
        return (keys,)
