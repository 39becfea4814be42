"""An attempt of a run on one rank: its configuration, topology, steps, the resumed checkpoint, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.config.freeze import config_hash
from mgpu_pipe.config.group_keys import SchedulerConfig
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import DataConfig, EvalConfig, RunConfig, TrainerConfig
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.run_clock import run_length
from mgpu_pipe.training.strategy import EngineStrategy

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger
    from transformers import PreTrainedModel


class TaskFigures(Protocol):
    """The tasks that every evaluation measures (``eval.tasks``)."""

    def __call__(self) -> dict[str, float]:
        """Measure all tasks; their figures by metric. Collective."""

    def summary_values(self) -> dict[str, Any]:
        """The fields of ``summary.json`` for each task."""


@dataclass
class TrainResult:
    """The result of an attempt."""

    model: PreTrainedModel
    status: str
    """``finished`` or ``stopped`` (by a signal, after saving)."""
    step: int
    metrics: dict[str, float]
    checkpoint: Path | None
    whole_model: bool = True
    """``model`` can be run by one rank; else parts of its weights are on other ranks only."""
    summary: dict[str, Any] = field(default_factory=dict)
    sampling_forward: Callable[..., Any] | None = None
    """See :meth:`EngineStrategy.sampling_forward`."""
    loggers: Sequence[Logger] = ()
    """The run's loggers, on rank 0, for its outputs after the last step."""


@dataclass(frozen=True)
class Inference:
    """Hooks into inference that a run needs while it trains. The worker passes them, since inference imports training.

    Attributes:
        sampler: builds the function that makes samples at a step; None where none are wanted.
        tasks: builds the tasks that every evaluation measures.
    """

    sampler: Callable[
        [RunConfig, RunPaths, Prepared, PreTrainedModel, EngineStrategy, int], Callable[[int], list[Any]] | None
    ]
    tasks: Callable[[EvalConfig, DataConfig, Prepared, Objective, EngineStrategy], TaskFigures]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run on this rank.

    Attributes:
        config: complete: what ``auto`` left to the data and the model is decided.
        config_hash: identity of the configuration as the user wrote it.
        dims: the sizes of every axis.
        plan: micro-batches of each rank.
        reader: the checkpoint that this attempt resumes.
        max_steps: optimizer steps of the run.
        total_steps: horizon of the learning-rate schedule.
    """

    config: RunConfig
    config_hash: str
    paths: RunPaths
    prepared: Prepared
    dims: ParallelDims
    plan: BatchPlan
    device: torch.device
    precision: str
    rank: int
    world_size: int
    reader: CheckpointReader | None
    start_step: int
    max_steps: int
    total_steps: int

    @classmethod
    def from_config(cls, config: RunConfig, paths: RunPaths, prepared: Prepared, resume: Path | None) -> Attempt:
        """The attempt that ``config`` describes, in this process group, from the step folder ``resume``."""
        complete = prepared.complete(config)
        world_size = dist.get_world_size()
        dims = ParallelDims.resolve(complete.strategy, world_size)
        reader = CheckpointReader(resume, complete.checkpoint.verify) if resume is not None else None
        max_steps = run_length(complete.data, complete.trainer, prepared)
        return cls(
            config=complete,
            config_hash=config_hash(config),
            paths=paths,
            prepared=prepared,
            dims=dims,
            plan=BatchPlan.resolve(complete.data, dims.data_parallel_size, dims.pp),
            device=_device(complete.trainer),
            precision=resolve_precision(complete.precision, complete.trainer),
            rank=dist.get_rank(),
            world_size=world_size,
            reader=reader,
            start_step=int(reader.state["step"]) if reader is not None else 0,
            max_steps=max_steps,
            total_steps=_schedule_horizon(complete.scheduler, reader, max_steps),
        )

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among the ranks that hold other samples."""
        return self.dims.data_parallel_rank(self.rank)

    def with_model(self, **values: Any) -> Attempt:
        """A copy of the attempt with other values of ``model.*``."""
        return replace(self, config=replace(self.config, model=replace(self.config.model, **values)))


def _schedule_horizon(scheduler: SchedulerConfig, reader: CheckpointReader | None, max_steps: int) -> int:
    if scheduler.total_steps is not None:
        return scheduler.total_steps
    return int(reader.state["total_steps"]) if reader is not None else max_steps


def _device(trainer: TrainerConfig) -> torch.device:
    if device_type(trainer) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
