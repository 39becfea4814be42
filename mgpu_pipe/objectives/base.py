"""The frame of every objective: a LightningModule whose batch is a step batch and whose strategy runs the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import pytorch_lightning as pl
import torch
from typing_extensions import Self

from mgpu_pipe.config.objective import Description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec
from mgpu_pipe.data.samples import Prepared, SampleSet
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.kernels.packed_attention import document_starts
from mgpu_pipe.objectives.causal_lm_keys import DESCRIPTION
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.objectives.packed_text import STARTS, forward_kwargs, packed_text, random_packed_text, wants_starts
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class StepResult:
    """What one optimizer step gave, equal on every rank."""

    loss: float
    """Global loss: sum over all valid tokens divided by their number."""
    gradient_norm: float
    """Global 2-norm before clipping."""
    stop: bool
    """Some rank was asked to stop; all leave here."""
    skipped: bool = False
    """No update: under a loss scale the gradients were not finite, on all ranks alike."""
    abandoned: bool = False
    """The step was left because of a stop, on all ranks alike: it leaves no trace, and a resume does it again."""

    save: bool = False
    """By some rank's clock a save is due."""

    @classmethod
    def left(cls) -> StepResult:
        """Of a step that was abandoned."""
        return cls(math.nan, math.nan, stop=True, abandoned=True)


class Together(Protocol):
    """The processes that share a step's samples."""

    def gather_samples(self, features: Batch) -> tuple[Batch, int]:
        """Features of the samples of all processes in order, and which is this process's first. A collective call."""

    def sum_of_own(self, values: torch.Tensor, own: slice) -> torch.Tensor:
        """Of the processes' sum of ``values``, a row for each of all samples, this process's rows. Collective; the
        processes have equally many samples."""

    @property
    def ring(self) -> int:
        """Processes that :meth:`pass_on` goes round; 1 where some share samples."""

    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        """What the process before this one passes on while this one passes on ``values``, of the same shape.
        Collective."""

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of what each process says of its samples; of those that share samples, one counts. Collective."""


class Alone:
    """One process, which has all samples."""

    ring = 1

    def gather_samples(self, features: Batch) -> tuple[Batch, int]:
        return dict(features), 0

    def sum_of_own(self, values: torch.Tensor, own: slice) -> torch.Tensor:
        return values[own]

    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        return values


class StepStrategy(Together, Protocol):
    """What an objective asks of the strategy plugin."""

    def run_step(self, step_batch: StepBatch) -> StepResult:
        """Forward and backward of every micro-batch, reduction, norm, the finite check, and clipping."""

    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        """This process's :meth:`Objective.evaluation_sums` over the step batch's micro-batches, without gradients."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the data-parallel processes."""

    def zero_gradients(self) -> None:
        """Clear all gradients."""


@dataclass
class Reference:
    """The losses of some samples, as plainly computed as can be."""

    loss_sum: torch.Tensor
    """Over what counts."""
    auxiliary_sum: torch.Tensor | float = 0.0
    """Of an additive auxiliary loss, over the samples; averaged over those of the step, and not part of the loss."""


Batch = dict[str, torch.Tensor]
Forward = Callable[..., Any]
LearningRate = Callable[[int], float]
"""The factor of the peak learning rate for a zero-based optimizer step."""


class Objective(pl.LightningModule, ABC):
    """Base of the objectives. A subclass defines :meth:`micro_batch_loss`.

    Args:
        model: the network; its ``named_parameters()`` are the names in checkpoints.
        optimizer_factory: builds the optimizer of the (already parallelised) model.
        learning_rate: the schedule, a pure function of the step, so that a resume needs no state for it.

    Attributes:
        evaluated: the metrics of the last evaluation, by key.
        found: what it found besides, for the summary and the report; JSON.
        gathers: whether :meth:`micro_batch_loss` gathers from other ranks by itself; then all call it equally often.
        description: what code without torch knows of it.
    """

    description: ClassVar[Description] = DESCRIPTION
    num_sums: ClassVar[int] = 1
    """Of :meth:`evaluation_sums`."""
    samples_meet: ClassVar[bool] = False
    """Whether a sample's loss looks at the others of its step; see :mod:`mgpu_pipe.objectives.global_batch`. It is then
    spread over neither ``pp`` nor ``cp``."""

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self._optimizer_factory = optimizer_factory
        self._learning_rate = learning_rate
        self._optimizer: Any = None
        self._sums: torch.Tensor | None = None
        self.evaluated: dict[str, float] = {}
        self.found: dict[str, Any] = {}
        self.gathers = False

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        """Build the objective of a run; a subclass reads its own keys of ``config.objective`` here."""
        return cls(model, optimizer_factory, learning_rate)

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        """What is trained and evaluated on, of the data's samples: as they are, or changed as they are read."""
        return samples

    @abstractmethod
    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the losses of one micro-batch's valid items, a scalar; the strategy divides it.

        Its gradient may hold an additive auxiliary loss besides, which its value does not.
        """

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """All samples of a step of :mod:`mgpu_pipe.verify`, of (seed, step) alone; what counts differs between them."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        return random_packed_text(generator, step, samples, seq_len, vocabulary, packed)

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """The plain computation that strategies are compared with; it shares no code with :meth:`micro_batch_loss`.

        Args:
            forward: calls the whole model of one process with keyword arguments and gives what it returns.
            model: that model, for its configuration.

        Raises:
            BadInputError: the objective brings none, so it cannot be verified.
        """
        name = type(self).__name__
        raise BadInputError(f"{name} defines no reference_loss, which verify compares with; define it")

    def needs_first_weights(self, start: RunStart) -> bool:
        """Whether :meth:`first_weights` is to be called, alike on every rank. A collective call."""
        return False

    def first_weights(self, start: RunStart) -> None:
        """Called when the model holds the weights that the run begins with, also where it goes on from others."""

    def of_data(self, prepared: Prepared) -> None:
        """Called before training or an evaluation with the data: what evaluating needs to know of it is kept here."""

    def of_run(self, start: RunStart) -> None:
        """Called before a run's held-out samples are evaluated by another program: what is to be known of the run.

        Raises:
            BadInputError: the run's folder does not tell it.
        """

    def start_step(self, step_batch: StepBatch) -> None:
        """Called before a training step's micro-batches; what their losses need to know of the step is kept here."""

    def meet(self, batches: Sequence[Mapping[str, torch.Tensor]], counted: int, world: Together) -> None:
        """Called with all of this process's micro-batches before the first loss of a step or evaluation; collective.

        Args:
            counted: how many of them count; the others are there because a forward pass gathers from all ranks.
            world: the processes with the step's other samples; see :mod:`mgpu_pipe.objectives.global_batch`.
        """

    @property
    def batch_spec(self) -> BatchSpec:
        """The fields of a micro-batch; packed text unless a subclass says otherwise."""
        return packed_text()

    def host_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the forward pass needs of a micro-batch that still is in host memory, where computing it waits for no
        device; it goes with the micro-batch."""
        documents = self.batch_spec.documents
        if documents is None or not wants_starts(self.model):
            return {}
        return {STARTS: document_starts(batch[documents])}

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass over a micro-batch."""
        return forward_kwargs(cast("PreTrainedModel", self.model), batch)

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What evaluation adds up over micro-batches: the sum of losses, then those of metrics; float64, one dim."""
        return self.micro_batch_loss(batch).reshape(1)

    def row_losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of packed rows the sum of each one's token losses, float64 of shape (rows,)."""
        raise NotImplementedError(f"{type(self).__name__} scores no text")

    @contextmanager
    def by_row(self) -> Iterator[None]:
        """Inside, an evaluation gives :meth:`row_losses` in the place of its sums."""
        self.__dict__["evaluation_sums"] = self.row_losses
        try:
            yield
        finally:
            del self.__dict__["evaluation_sums"]

    def last_sums(self, world: Together) -> torch.Tensor | float:
        """Called behind the last evaluated step batch: what all evaluated samples together add to the sums of all
        processes. A collective call."""
        return 0.0

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        """From the sums over the held-out samples, as metrics are measured, to :attr:`found`."""
        return {}

    def share_sequences(
        self, groups: Sequence[torch.distributed.ProcessGroup], along: torch.distributed.ProcessGroup | None
    ) -> None:
        """Told which ranks hold other tokens of the same sequences, before the first step."""

    def stage_output(
        self, batch: Mapping[str, torch.Tensor], scale: float, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """What a pipeline's stage without a loss hands on, ``compute()``, to which an auxiliary loss may be attached.

        Args:
            scale: the loss scale, which multiplies all gradients.
        """
        return compute()

    def sampling_batch(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        """The micro-batch of whole texts that are being generated, from what transformers hands a model."""
        raise NotImplementedError(f"{type(self).__name__} does not generate text")

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
            # A step without gradients changes nothing; Lightning counts it, so the run does not go on past its end.
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
        # The count is the step batch's global one on every rank, so it is not summed over ranks.
        self._sums[-1] += step_batch.loss_denominator

    def on_validation_epoch_end(self) -> None:
        assert self._sums is not None
        strategy = cast(StepStrategy, self.trainer.strategy)
        last = self.last_sums(strategy)
        sums = [*(strategy.sum_over_data(self._sums[:-1]) + last).tolist(), float(self._sums[-1])]
        self.evaluated, self.found = dict(self.description.measured(sums)), self.findings(sums)
        for key, value in self.evaluated.items():
            self.log(key, torch.tensor(value, dtype=torch.float64), logger=False, batch_size=1)
