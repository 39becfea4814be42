"""What a micro-batch is made of: for each field what cutting, padding, sending and leaving it out have to know.

The objective owns its :class:`BatchSpec`; whatever handles micro-batches takes it and knows no field by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
Stages = Literal["all", "first", "last"]


@dataclass(frozen=True)
class Field:
    """One tensor of a micro-batch, whose first dimension is its samples.

    Attributes:
        sequence_dim: the dimension that runs along the sequence; None where a sample has no sequence in it.
        padding: the value that says nothing.
        counting: padding counts up from 0 instead: of positions, where what is added is a document of its own.
        target: what the loss compares with; where it holds ``padding``, it counts nothing.
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
        """Of its sequences; 0 where there are none."""
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim if name in self.fields else None
            if dim is not None:
                return value.shape[dim]
        return 0

    def documents_of(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The field :attr:`documents`, of shape (rows, length).

        Raises:
            ValueError: there is none.
        """
        if self.documents is None:
            raise ValueError("these micro-batches have no field that tells documents apart")
        return batch[self.documents]

    def needed(self, first: bool, last: bool) -> tuple[str, ...]:
        """The fields that a rank needs whose pipeline stages are (among) the first, the last, or neither."""
        return tuple(
            name
            for name, field in self.fields.items()
            if field.stages == "all" or (first and field.stages == "first") or (last and field.stages == "last")
        )

    def in_stage(self, batch: Mapping[str, torch.Tensor], first: bool, last: bool) -> dict[str, torch.Tensor]:
        """A micro-batch without the fields that a pipeline stage does not need."""
        needed = self.needed(first, last)
        return {name: value for name, value in batch.items() if name not in self.fields or name in needed}

    def joined(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """All rows of micro-batches in one. Their sequences are equally long; what else is shorter is filled up."""
        import torch

        joined = {}
        for name in batches[0]:
            values = [batch[name] for batch in batches]
            shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
            if any(list(value.shape[1:]) != shape for value in values):
                padding = self.fields[name].padding
                for at, value in enumerate(values):
                    values[at] = value.new_full((len(value), *shape), padding)
                    values[at][tuple(map(slice, value.shape))] = value
            joined[name] = torch.cat(values)
        return joined

    def targets(self) -> Iterator[tuple[str, Field]]:
        return ((name, field) for name, field in self.fields.items() if field.target)

    def valid_targets(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The targets that count; samples where there is no target."""
        counts = [int(batch[name].ne(field.padding).sum()) for name, field in self.targets()]
        return sum(counts) if counts else self.rows(batch)

    def without_targets(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A micro-batch of the same shape whose loss is zero, for a process that only takes part."""
        empty = {name: batch[name].new_full(batch[name].shape, field.padding) for name, field in self.targets()}
        return {**batch, **empty}

    def empty(self, length: int, device: torch.device) -> dict[str, torch.Tensor]:
        """A micro-batch of one sample of ``length`` that counts nothing, for a rank that has none where others do."""
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
        return self.padded(batch, length)

    def padded(self, batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        """``batch`` with sequences of at least ``length``; what is added is a document that counts nothing."""
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
