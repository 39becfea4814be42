"""The step batch: everything one optimizer step consumes on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""A target that counts nothing."""


@dataclass
class StepBatch:
    """This process's micro-batches of one optimizer step.

    The fields of a micro-batch are what the objective's :class:`~mgpu_pipe.data.batch_spec.BatchSpec` says.
    """

    step: int
    """Zero-based index of the optimizer step (or of the evaluation step batch)."""
    first_sample: int
    """Global index of the step's first sample: ``step * global_batch_size``."""
    num_samples: int
    """Samples of the step over all processes; only the last evaluation step batch has fewer than the others."""
    micro_batches: list[dict[str, torch.Tensor]]
    """This process's share; may be empty or ragged only in the last evaluation step batch."""
    loss_denominator: int
    """What counts in the step over all processes (valid tokens, samples); the sum of losses is divided by it."""
    num_tokens: int = 0
    """Positions that the model computes in the step, over all processes, padding included; 0 where nobody counts."""
    padding: int = 0
    """Those of ``num_tokens`` that hold no document."""


class ListedStepBatches:
    """Step batches that are at hand, for Lightning, which would take a list of them for several loaders."""

    def __init__(self, step_batches: list[StepBatch]) -> None:
        self._step_batches = step_batches

    def __len__(self) -> int:
        return len(self._step_batches)

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._step_batches)
