"""The result of an attempt: its model as trained, and the run's ``summary.json``. Inside a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mgpu_pipe.config.objective import bits_per_byte, description
from mgpu_pipe.config.resolve import uses_tf32
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.parallel.random_streams import STATISTICAL, uses_dropout
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.rank_memory import by_rank, memory_by_rank
from mgpu_pipe.training.recorder import StepRecorder, peak_memory_gib
from mgpu_pipe.training.save_and_resume import Checkpointer
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


def train_result(
    config: RunConfig,
    prepared: Prepared,
    dims: ParallelDims,
    plan: BatchPlan,
    model: PreTrainedModel,
    strategy: EngineStrategy,
    recorder: StepRecorder,
    checkpointer: Checkpointer,
    precision: str,
    sizes: dict[str, int],
    tasks: TaskFigures | None,
    ended_by_time: bool,
) -> TrainResult:
    """The result of an attempt. Collective.

    Args:
        sizes: numbers of parameters, as ``summary.json`` names them.
        ended_by_time: ``trainer.max_time`` alone ended it.
    """
    memory = memory_by_rank(strategy.memory_parts(), peak_memory_gib(strategy.root_device), strategy.root_device)
    stopped = recorder.stopped and recorder.step < recorder.max_steps and not ended_by_time
    status = "stopped" if stopped else "finished"
    metrics = {**recorder.metrics, **recorder.throughput()}
    for metric in description(config.objective.name).metrics:
        if metric.baseline is not None and getattr(prepared, metric.baseline, None) is not None:
            metrics[f"val/{metric.baseline}"] = getattr(prepared, metric.baseline)
    metrics |= bits_per_byte(metrics, *prepared.evaluated_text())
    checkpoint = checkpointer.last_path
    summary = {
        "status": status,
        "step": recorder.step,
        "max_steps": recorder.max_steps,
        **({"max_time": config.trainer.max_time} if ended_by_time else {}),
        "world_size": dims.world_size,
        "topology": dims.as_dict(),
        "strategy": config.strategy.name,
        "objective": config.objective.name,
        "precision": precision,
        **({"parity": STATISTICAL} if uses_dropout(model) else {}),
        "tf32": uses_tf32(config),
        "kernels": config.model.kernels,
        "metrics": metrics,
        "checkpoint": str(checkpoint.relative_to(checkpoint.parents[1])) if checkpoint is not None else None,
        "model": {"name": config.model.name, "class": type(model).__name__.removeprefix("FSDP"), **sizes},
        "batch": {
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "data_parallel_size": plan.data_parallel_size,
            "seq_len": config.data.seq_len,
        },
        "data": prepared.as_dict(),
        **({"found": details} if (details := strategy.objective.evaluation_details) else {}),
        **({"tasks": tasks.summary_values()} if tasks is not None else {}),
        "memory": memory,
        "times": by_rank(recorder.times(), strategy.root_device),
    }
    return TrainResult(
        model,
        status,
        recorder.step,
        metrics,
        checkpoint,
        strategy.holds_whole_model,
        summary,
        strategy.sampling_forward(),
    )
