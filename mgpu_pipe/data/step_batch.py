"""The step batch: all data of one optimizer step on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


Stages = Literal["all", "first", "last"]


@dataclass(frozen=True)
class Field:
    """One tensor of a micro-batch; its first dimension is the samples.

    Attributes:
        sequence_dim: the dimension of the sequence; None where a sample has no sequence.
        padding: the value of padding.
        counting: padding counts up from 0 instead: for positions, so that padding is a separate document.
        target: the loss compares with it; entries equal to ``padding`` do not count.
        stages: the pipeline stages that need it.
        shape: of one sample, its sequence left out.
    """

    sequence_dim: int | None = 1
    padding: float = 0
    counting: bool = False
    target: bool = False
    stages: Stages = "all"
    dtype: str = "int64"
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchSpec:
    """The fields of a micro-batch by name.

    Attributes:
        documents: the field whose values, where they do not go up by one along the sequence, begin a new document;
            None where a sample is one document.
    """

    fields: Mapping[str, Field]
    documents: str | None = None

    def rows(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Samples of a micro-batch."""
        return next(iter(batch.values())).shape[0]

    def length(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Length of the sequences; 0 where there are none."""
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim if name in self.fields else None
            if dim is not None:
                return value.shape[dim]
        return 0

    def documents_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the field :attr:`documents`, (rows, length); ValueError without it."""
        if self.documents is None:
            raise ValueError("these micro-batches have no field that tells documents apart")
        return batch[self.documents]

    def needed_fields(self, first: bool, last: bool) -> tuple[str, ...]:
        """Fields that a rank needs, by whether it has the first or the last pipeline stage."""
        return tuple(
            name
            for name, field in self.fields.items()
            if field.stages == "all" or (first and field.stages == "first") or (last and field.stages == "last")
        )

    def in_stage(self, batch: Mapping[str, torch.Tensor], first: bool, last: bool) -> dict[str, torch.Tensor]:
        """Drops the fields that a pipeline stage does not need."""
        needed = self.needed_fields(first, last)
        return {name: value for name, value in batch.items() if name not in self.fields or name in needed}

    def join(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Concatenates rows of micro-batches, short dimensions padded; what is no field (starts of documents) repeats
        its end."""
        import torch

        joined = {}
        for name in batches[0]:
            values = [batch[name] for batch in batches]
            shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
            if any(list(value.shape[1:]) != shape for value in values):
                for index, value in enumerate(values):
                    values[index] = self._pad(name, value, shape)
            joined[name] = torch.cat(values)
        return joined

    def _pad(self, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """``value`` with dimensions of ``shape`` after its first one."""
        import torch

        if name in self.fields:
            padded = value.new_full((len(value), *shape), self.fields[name].padding)
            padded[tuple(map(slice, value.shape))] = value
            return padded
        for dim, size in enumerate(shape, start=1):
            last = value.shape[dim] - 1
            indices = torch.arange(size, device=value.device).clamp(max=last)
            value = value.index_select(dim, indices)
        return value

    def targets(self) -> Iterator[tuple[str, Field]]:
        return ((name, field) for name, field in self.fields.items() if field.target)

    def valid_targets(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Number of targets that count, or of samples where there is no target."""
        counts = [int(batch[name].ne(field.padding).sum()) for name, field in self.targets()]
        return sum(counts) if counts else self.rows(batch)

    def without_targets(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies a micro-batch with zero loss, for a process that only joins the collectives."""
        empty = {name: batch[name].new_full(batch[name].shape, field.padding) for name, field in self.targets()}
        return {**batch, **empty}

    def empty(self, length: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Micro-batch of one sample of ``length`` with zero loss, for a rank without data where others have some."""
        import torch

        batch: dict[str, torch.Tensor] = {}
        for name, field in self.fields.items():
            shape = [1, *field.shape]
            dtype = getattr(torch, field.dtype)
            if field.sequence_dim is not None:
                shape.insert(field.sequence_dim, 0)
            value = torch.zeros(shape, dtype=dtype, device=device)
            if field.sequence_dim is None:
                value.fill_(field.padding)
            batch[name] = value
        return self.pad(batch, length)

    def pad(self, batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        """Pads ``batch`` to sequences of at least ``length``; the padding is a document without targets."""
        import torch

        padded = dict(batch)
        for name, value in batch.items():
            field = self.fields.get(name)
            dim = None if field is None else field.sequence_dim
            if field is None or dim is None or value.shape[dim] >= length:
                continue
            missing = length - value.shape[dim]
            shape = [*value.shape[:dim], missing, *value.shape[dim + 1 :]]
            if field.counting:
                along = [1] * value.dim()
                along[dim] = missing
                tail = torch.arange(missing, dtype=value.dtype, device=value.device).view(along).expand(shape)
            else:
                tail = value.new_full(shape, field.padding)
            padded[name] = torch.cat([value, tail], dim=dim)
        return padded


IGNORE_INDEX = -100
"""Target that does not count."""


@dataclass
class StepBatch:
    """This process's micro-batches of one optimizer step.

    The objective's :class:`~mgpu_pipe.data.step_batch.BatchSpec` describes the fields of a micro-batch.
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
    """Valid tokens or samples of the step over all processes; the sum of losses is divided by it."""
    num_tokens: int = 0
    """Positions that the model computes in the step over all processes, padding included; 0 where not counted."""
    padding: int = 0
    """Positions among ``num_tokens`` without a document."""

    @property
    def loss_divisor(self) -> int:
        """Divisor of the loss: :attr:`loss_denominator`, or 1 for a step without targets, whose loss is 0."""
        return max(1, self.loss_denominator)


class ListedStepBatches:
    """A list of step batches in a form for Lightning, which would take a list for several loaders."""

    def __init__(self, step_batches: list[StepBatch]) -> None:
        self._step_batches = step_batches

    def __len__(self) -> int:
        return len(self._step_batches)

    def __iter__(self) -> Iterator[StepBatch]:
        return iter(self._step_batches)
