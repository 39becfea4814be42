"""The step batch: everything one optimizer step consumes on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


def without_labels(micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A micro-batch of the same shape whose loss is zero, for a process that only takes part."""
    return {**micro_batch, "labels": micro_batch["labels"].new_full(micro_batch["labels"].shape, IGNORE_INDEX)}


@dataclass
class StepBatch:
    """This process's micro-batches of one optimizer step.

    A micro-batch of a causal language model holds int64 tensors of shape ``(micro_batch_size, seq_len)``:
    ``input_ids``; ``labels``, already shifted (``labels[:, t]`` is the token after ``input_ids[:, t]`` in the same
    document, or ``IGNORE_INDEX``); ``position_ids``, which restart at 0 with every document of a pack.
    Padding is a document of its own whose labels are all ``IGNORE_INDEX``.
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
    """Valid tokens of the step over all processes; the loss is their sum of losses over this number."""
    num_tokens: int = 0
    """Positions that the model computes in the step, over all processes, padding included; 0 where nobody counts."""
    padding: int = 0
    """Those of ``num_tokens`` that hold no document."""


class ListedStepBatches:
    """Step batchs that are at hand, for Lightning, which would take a list of them for several loaders."""

    def __init__(self, step_batches: list[StepBatch]) -> None:
        self._step_batches = step_batches

    def __len__(self) -> int:
        return len(self._step_batches)

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._step_batches)
