"""The samples of a data set of arrays as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.samples import random_of
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.arrays import ArrayData


class ArraySamples:
    """A :class:`mgpu_pipe.data.samples.SampleSet` of the data set that ``data.source`` names.

    Args:
        reopen: gives the same samples in another process; it can be pickled.
    """

    def __init__(self, config: RunConfig, data: ArrayData, reopen: Callable[[], ArraySamples]) -> None:
        self._config, self._data, self._reopen = config, data, reopen
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
        DataError: the samples have different fields or shapes.
        """
        seed = self._config.seed
        rows = [
            {name: np.asarray(value) for name, value in self._data.sample(index, random_of(seed, number)).items()}
            for index, number in zip(indices.tolist(), numbers.tolist(), strict=True)
        ]
        shapes = {name: value.shape for name, value in rows[0].items()}
        for index, row in zip(indices.tolist(), rows, strict=True):
            if {name: value.shape for name, value in row.items()} != shapes:
                where = f"data.source={self._config.data.source}: sample {index}"
                raise DataError(f"{where} has other fields or shapes than sample {indices[0]}; make them equal")
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in shapes}
