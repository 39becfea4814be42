"""Data sets of arrays that installed packages provide: images, features, ready-made token samples.

A package registers a subclass of :class:`ArrayData` in the entry point group ``mgpu_pipe.data``; ``data.source`` names
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.plugins import DATA_GROUP, entry_names, load
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.samples import Prepared, Split, evaluated_samples, random_of
from mgpu_pipe.errors import BadInputError, ConfigError, DataError

if TYPE_CHECKING:
    import torch


class Arrays(Protocol):
    """Samples as arrays; the methods are those of :class:`ArrayData`."""

    @property
    def valid_units(self) -> NDArray[np.int64]: ...

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]: ...

    def positions(self, index: int) -> int: ...


class ArrayData(ABC):
    """One split of a data set. Every reading process builds it; equal arguments give equal samples.

    Args:
        config: of the run. The set decides what it holds out, for example by ``config.data.validation_fraction``.
        split: ``train``, or ``validation``, which may be empty.
    """

    def __init__(self, config: RunConfig, split: Split) -> None:
        self.config, self.split = config, split

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identity of the split's content: equal digests mean equal samples in equal order."""

    @property
    @abstractmethod
    def valid_units(self) -> NDArray[np.int64]:
        """Units that each sample adds to the loss denominator; shape ``(samples,)``, which also counts the samples."""

    @abstractmethod
    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        """Arrays of one sample, by the names that the objective expects; shapes are equal in all samples.

        Args:
            random: for crops, noise and the like, keyed by the seed and the number of the sample in the run. So no
                sample depends on the number of processes.
        """

    def positions(self, index: int) -> int:
        """Positions that the model computes for a sample, for the throughput; 0 where they are not counted."""
        return 0


@dataclass(frozen=True)
class PreparedArrays(Prepared):
    """A data set of arrays: every process opens it, nothing is cached."""

    kind: ClassVar[str] = "arrays"
    source: str
    digest: str
    validation_digest: str
    train_samples: int
    held_out_samples: int
    """Held-out samples; an evaluation takes ``validation_samples`` of them."""
    validation_samples: int
    tokenizer_folder: Path | None = None
    unigram_perplexity: float | None = None

    def open(self, config: RunConfig, split: Split) -> ArraySamples:
        data = open_arrays(config, split)
        expected = self.digest if split == "train" else self.validation_digest
        if data.digest != expected:
            problem = "holds other samples than at the start of the run"
            raise DataError(f"data.source={self.source}: {problem}; restore them, or start a new run")
        return ArraySamples(config.seed, config.data.source, data, partial(self.open, config, split))

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    def is_here(self) -> bool:
        return True

    def amounts(self) -> list[tuple[int, str]]:
        return []

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{name: entry for name, entry in value.items() if name != "kind"})


def array_class(source: str) -> type[ArrayData] | None:
    """Class that a package registers under ``source``; None where the source is of another kind."""
    if find_source(source) or source not in entry_names(DATA_GROUP):
        return None
    named = load("data.source", source, DATA_GROUP)
    return named if isinstance(named, type) and issubclass(named, ArrayData) else None


def open_arrays(config: RunConfig, split: Split) -> ArrayData:
    """Opens one split; DataError if the class fails, or its valid units are not one whole number a sample."""
    source = config.data.source
    kind = array_class(source)
    if kind is None:
        raise DataError(f"data.source={source}: is no data set of arrays; register a subclass of ArrayData")
    try:
        data = kind(config, split)
        units = data.valid_units
    except BadInputError:
        raise
    except Exception as error:  # a plug-in may raise anything
        raise DataError(
            f"data.source={source}: cannot be opened ({type(error).__name__}: {error}); correct its package"
        ) from error
    if not isinstance(units, np.ndarray) or units.ndim != 1 or units.dtype.kind not in "iu" or (units < 0).any():
        raise DataError(f"data.source={source}: valid_units has another form; return a whole number for each sample")
    return data


def prepare_arrays(config: RunConfig, progress: Progress | None = None) -> PreparedArrays:
    """Facts of the data set that ``data.source`` names.

    Raises:
        ConfigError: ``objective.sample_prompts`` has prompts, and there is no tokenizer to continue them.
        DataError: it cannot be opened, or there is nothing to train on.
    """
    data, prompts = config.data, config.objective.prompts()[0]
    if prompts:
        raise ConfigError("objective.sample_prompts", prompts, "use []", f"data.source={data.source} has no tokenizer")
    train, held_out = open_arrays(config, "train"), open_arrays(config, "validation")
    if not len(train.valid_units) or not train.valid_units.sum():
        problem = "there is nothing to train on: no sample counts in the loss"
        raise DataError(f"data.source={data.source}: {problem}; return valid_units above 0")
    available = len(held_out.valid_units)
    return PreparedArrays(
        source=data.source,
        digest=train.digest,
        validation_digest=held_out.digest if available else "",
        train_samples=len(train.valid_units),
        held_out_samples=available,
        validation_samples=min(available, data.validation_max_samples or available),
    )


class ArraySamples:
    """A :class:`mgpu_pipe.data.samples.SampleSet` over the arrays that ``data.source`` names.

    Args:
        reopen: opens the same samples in another process; picklable.
    """

    def __init__(self, seed: int, source: str, data: Arrays, reopen: Callable[[], ArraySamples]) -> None:
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
        import torch

        stacked: dict[str, NDArray[Any]] = {}
        for position, (index, number) in enumerate(zip(indices.tolist(), numbers.tolist(), strict=True)):
            row = self._data.sample(index, random_of(self._seed, number))
            values = {name: np.asarray(value) for name, value in row.items()}
            if not position:
                stacked = {name: np.empty((len(indices), *array.shape), array.dtype) for name, array in values.items()}
            kinds = {name: (value.shape[1:], value.dtype) for name, value in stacked.items()}
            if {name: (value.shape, value.dtype) for name, value in values.items()} != kinds:
                where = f"data.source={self._source}: sample {index}"
                raise DataError(
                    f"{where} has other fields, shapes or types than sample {indices[0]}; return equal ones"
                )
            for name, value in values.items():  # copied at once: the next sample may reuse its memory
                stacked[name][position] = value
        return {name: torch.from_numpy(value) for name, value in stacked.items()}
