"""Processes that share the samples of a step: what an objective asks of them, alone and in a world of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from mgpu_pipe.parallel.context.ring import pass_on
from mgpu_pipe.parallel.tensor.collectives import all_gather_parts, reduce_scatter_parts
from mgpu_pipe.topology import ParallelDims

Batch = dict[str, torch.Tensor]


class SampleGroup(Protocol):
    """Processes that share the samples of a step."""

    def gather_samples(self, features: Batch) -> tuple[Batch, int]:
        """Features of all processes' samples in order, and the index of this process's first. Collective."""

    def sum_of_own(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Reduce-scatter of ``values``, one row per sample of all processes: the sum's ``rows`` of this process.

        Collective. All processes have equally many samples.
        """

    @property
    def ring(self) -> int:
        """Number of processes that :meth:`pass_on` cycles through; 1 where some share samples."""

    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        """Sends ``values`` to the next process and returns those of the previous one, same shape. Collective."""

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce over samples. Of processes that share samples, one contributes and the others add zero."""


class SingleProcess:
    """:class:`SampleGroup` of one process, which has all samples."""

    ring = 1

    def gather_samples(self, features: Batch) -> tuple[Batch, int]:
        return dict(features), 0

    def sum_of_own(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        return values[rows]

    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        return values


class ProcessSamples:
    """:class:`SampleGroup` of all processes of the default group.

    Attributes:
        dims: the sizes of every axis.
    """

    dims: ParallelDims

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place; of those that share samples, all but one add zeros.
        Collective.
        """
        if self.dims.world_size > 1:
            dist.all_reduce(values)
        return values

    @torch.no_grad()
    def gather_samples(self, features: Mapping[str, torch.Tensor]) -> tuple[Batch, int]:
        """Gather the features of all data-parallel processes in order. Collective.

        Returns the features by name, and the index of this process's first sample.

        Args:
            features: by name, a row for each of this process's samples, equal on processes that share them; any number.
        """
        size, rank = self.dims.data_parallel_size, self.dims.data_parallel_rank(dist.get_rank())
        first_rows = next(iter(features.values()))
        counted_rows = len(first_rows) if self.counts_its_samples else 0
        counts = torch.zeros(size, dtype=torch.int64, device=first_rows.device)
        counts[rank] = counted_rows
        ends = self.sum_over_data(counts).cumsum(0).tolist()
        first, even = ends[rank] - len(first_rows), ends == [ends[0] * (1 + number) for number in range(size)]
        if even and (world := self._separate_samples):
            return {name: all_gather_parts(rows, world).flatten(0, 1) for name, rows in features.items()}, first
        whole = {name: rows.new_zeros(ends[-1], *rows.shape[1:]) for name, rows in features.items()}
        for name, rows in features.items():
            whole[name][first : first + counted_rows] = rows[:counted_rows]
            self.sum_over_data(whole[name])
        return whole, first

    @torch.no_grad()
    def sum_of_own(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """This process's rows of the sum of ``values`` over processes. Collective.

        Args:
            values: a row for each sample of all processes, which have equally many samples.
            rows: those of this process.
        """
        world = self._separate_samples
        return reduce_scatter_parts(values, world) if world else self.sum_over_samples(values)[rows]

    @property
    def ring(self) -> int:
        """Processes that :meth:`pass_on` goes round; 1 where some share samples."""
        return self.dims.world_size if self._separate_samples else 1

    @torch.no_grad()
    def pass_on(self, values: torch.Tensor) -> torch.Tensor:
        """Send ``values`` to the next process; returns the previous one's, of the same shape. Collective."""
        assert self._separate_samples is not None
        return pass_on(values, self._separate_samples)()

    @property
    def _separate_samples(self) -> dist.ProcessGroup | None:
        """All processes if no two share samples; else None."""
        return dist.group.WORLD if self.dims.world_size == self.dims.data_parallel_size > 1 else None

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce over samples. Of processes that share samples, one contributes; the others add zeros."""
        return self.sum_over_data(values if self.counts_its_samples else torch.zeros_like(values))

    @property
    def counts_its_samples(self) -> bool:
        """Whether this process counts its samples: exactly one of those that share them."""
        return True
