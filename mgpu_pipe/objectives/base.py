"""The frame of every objective: a LightningModule whose batch is a step batch and whose strategy runs the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pytorch_lightning as pl
import torch
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch


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

    @classmethod
    def left(cls) -> StepResult:
        """Of a step that was abandoned."""
        return cls(math.nan, math.nan, stop=True, abandoned=True)


class StepStrategy(Protocol):
    """What an objective asks of the strategy plugin."""

    def run_step(self, step_batch: StepBatch) -> StepResult:
        """Forward and backward of every micro-batch, reduction, norm, the finite check, and clipping."""

    def run_evaluation(self, step_batch: StepBatch) -> torch.Tensor:
        """This process's sum of losses over the step batch's micro-batches, a float64 scalar, without gradients."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the data-parallel processes."""

    def zero_gradients(self) -> None:
        """Clear all gradients."""


LearningRate = Callable[[int], float]
"""The factor of the peak learning rate for a zero-based optimizer step."""


class Objective(pl.LightningModule, ABC):
    """Base of the objectives. A subclass defines :meth:`micro_batch_loss`.

    Args:
        model: the network; its ``named_parameters()`` are the names in checkpoints.
        optimizer_factory: builds the optimizer of the (already parallelised) model.
        learning_rate: the schedule, a pure function of the step, so that a resume needs no state for it.
    """

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self._optimizer_factory = optimizer_factory
        self._learning_rate = learning_rate
        self._optimizer: Any = None
        self._evaluated: torch.Tensor | None = None

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        """Build the objective of a run; a subclass reads its own keys of ``config.objective`` here."""
        return cls(model, optimizer_factory, learning_rate)

    @abstractmethod
    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the losses of one micro-batch's valid items, a scalar; the strategy divides it.

        Its gradient may hold an additive auxiliary loss besides, which its value does not.
        """

    def start_step(self, step_batch: StepBatch) -> None:
        """Called before a training step's micro-batches; what their losses need to know of the step is kept here."""

    def empty_micro_batch(self, seq_len: int, device: torch.device) -> dict[str, torch.Tensor]:
        """A micro-batch of one sample that counts nothing, for a rank that has none where others have one."""
        zeros = torch.zeros(1, seq_len, dtype=torch.int64, device=device)
        positions = torch.arange(seq_len, device=device)[None]
        return {"input_ids": zeros, "labels": torch.full_like(zeros, IGNORE_INDEX), "position_ids": positions}

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
            group["lr"] = group["initial_lr"] * factor
        if result.skipped:
            # A step without gradients changes nothing; Lightning counts it, so the run does not go on past its end.
            strategy.zero_gradients()
        self._optimizer.step()
        strategy.zero_gradients()
        return {"result": result, "lr": self._optimizer.param_groups[0]["lr"]}

    def on_validation_start(self) -> None:
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.trainer.strategy.root_device)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        assert self._evaluated is not None
        strategy = cast(StepStrategy, self.trainer.strategy)
        self._evaluated[0] += strategy.run_evaluation(step_batch)
        # The count is the step batch's global one on every rank, so it is not summed over ranks.
        self._evaluated[1] += step_batch.loss_denominator

    def on_validation_epoch_end(self) -> None:
        assert self._evaluated is not None
        strategy = cast(StepStrategy, self.trainer.strategy)
        loss = float(strategy.sum_over_data(self._evaluated[:1])[0] / self._evaluated[1])
        self.log("val/loss", torch.tensor(loss, dtype=torch.float64), logger=False, batch_size=1)
