"""Tensor samples of a data set of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.data.samples import random_of
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.arrays import ArrayData


class ArraySamples:
    """A :class:`mgpu_pipe.data.samples.SampleSet` over the arrays that ``data.source`` names.

    Args:
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(self, seed: int, source: str, data: ArrayData, reopen: Callable[[], ArraySamples]) -> None:
        self._seed, self._source, self._data, self._reopen = seed, source, data, reopen
        self._units = data.valid_units

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the set itself."""
        return self._reopen, ()

    def __len__(self) -> int:
        return len(self._units)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return int(self._units[indices].sum())

    def positions(self, indices: NDArray[np.int64]) -> int:
        return sum(self._data.positions(int(index)) for index in indices)

    def padding(self, indices: NDArray[np.int64]) -> int:
        return 0

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Raises:
        DataError: the samples have different fields, shapes or types.
        """
        stacked: dict[str, NDArray[Any]] = {}
        for position, (index, number) in enumerate(zip(indices.tolist(), numbers.tolist(), strict=True)):
            row = self._data.sample(index, random_of(self._seed, number))
            values = {name: np.asarray(value) for name, value in row.items()}
            if not position:
                stacked = {name: np.empty((len(indices), *array.shape), array.dtype) for name, array in values.items()}
            kinds = {name: (value.shape[1:], value.dtype) for name, value in stacked.items()}
            if {name: (value.shape, value.dtype) for name, value in values.items()} != kinds:
                where = f"data.source={self._source}: sample {index}"
                raise DataError(f"{where} has other fields, shapes or types than sample {indices[0]}; make them equal")
            for name, value in values.items():  # at once, while it is near; its memory is the next sample's
                stacked[name][position] = value
        return {name: torch.from_numpy(value) for name, value in stacked.items()}
