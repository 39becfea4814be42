"""Protocols of what only some objectives do. An objective has one by defining its methods, next to its base class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.objectives.sample_group import SampleGroup


@runtime_checkable
class FeatureGatherer(Protocol):
    """Objective in which a sample's loss depends on the other samples of its step.

    It supports neither ``pp`` nor ``cp``; see :mod:`mgpu_pipe.objectives.global_batch`.
    """

    def gather_features(
        self, batches: Sequence[Mapping[str, torch.Tensor]], num_valid: int, world: SampleGroup
    ) -> None:
        """Called with all micro-batches of this process before the first loss of a step or evaluation. Collective.

        Args:
            num_valid: how many of them count. The rest only join forward passes that gather from all ranks.
            world: the processes with the step's other samples.
        """

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """Called after the last evaluated step batch. Sums over all evaluated samples together, added to those of
        all processes. Collective."""


@runtime_checkable
class TextGenerator(Protocol):
    """Objective whose model continues text under any strategy."""

    def sampling_batch(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        """Micro-batch of whole texts during generation, from the arguments that transformers passes to a model."""


@runtime_checkable
class RowScorer(Protocol):
    """Objective that scores texts, which tasks (``eval.tasks``) compare."""

    def row_losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of token losses of each packed row, float64, (rows,)."""


@runtime_checkable
class WeightMeasurer(Protocol):
    """Objective that measures the weights that a run begins with, before its first step.

    Attributes:
        measures_weights: the run's first weights, or those that this attempt loaded.
    """

    measures_weights: Literal["first", "loaded"]

    def needs_first_weights(self, start: RunStart) -> bool:
        """Whether the trainer must call :meth:`first_weights`; equal on every rank. Collective."""

    def first_weights(self, start: RunStart) -> None:
        """Called before the first step, with the weights of :attr:`measures_weights` in the model."""

    def of_run(self, start: RunStart) -> None:
        """Called before another program evaluates a run's held-out samples. Loads what it needs of the run.

        Raises:
            BadInputError: the run's folder does not contain it.
        """


@runtime_checkable
class StepMeasurer(Protocol):
    """Objective whose losses need a number of the whole step batch, which a pass without gradients gives."""

    def measure_step(self, step_batch: StepBatch, evaluate: Callable[[StepBatch], torch.Tensor]) -> None:
        """Called before the losses of a step batch. Collective.

        Args:
            evaluate: sums of :meth:`Objective.evaluation_sums` over a step batch of all processes.
        """


PROTOCOLS: tuple[type, ...] = (FeatureGatherer, TextGenerator, RowScorer, WeightMeasurer, StepMeasurer)


def gather_features(
    objective: object, batches: Sequence[Mapping[str, torch.Tensor]], num_valid: int, world: SampleGroup
) -> None:
    """Call :meth:`FeatureGatherer.gather_features` of an objective that has it. Collective."""
    if isinstance(objective, FeatureGatherer):
        objective.gather_features(batches, num_valid, world)
