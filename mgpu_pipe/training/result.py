"""The result of an attempt: its model as trained, and the run's ``summary.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
