"""What a data set is: samples by index, whose valid units are known beforehand, and an identity.

:class:`SampleSet` is what the loader asks, :class:`Prepared` what the launcher makes and hands to the workers. Packed
text (:mod:`mgpu_pipe.data.text`) is one implementation, dictionaries of arrays (:mod:`mgpu_pipe.data.arrays`) another.
No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.order import GlobalOrder, Order
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "validation"]
_EVALUATION_KEY = 0x5EED
"""Keys the choice of evaluated samples; not the run's seed, so that evaluations of different runs are comparable."""


class SampleSet(Protocol):
    """One split's samples. Another process that takes part opens the split itself (``__reduce__``).

    ``indices`` are the samples' places in the set, ``numbers`` what they count as in the run: a sample's random numbers
    depend on the seed and its number alone. Both have shape ``(rows,)``.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The samples, stacked: tensors whose first dimension is ``rows``."""

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """What the samples add to the loss denominator, without reading them."""

    def positions(self, indices: NDArray[np.int64]) -> int:
        """Positions that the model computes for these samples, padding included; 0 where nobody counts them."""

    def padding(self, indices: NDArray[np.int64]) -> int:
        """Those of the positions that hold nothing."""


@runtime_checkable
class Weighed(Protocol):
    """A :class:`SampleSet` whose samples differ in what they cost."""

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """What each sample costs beyond what all cost alike, in units of its own; shape ``(rows,)``."""


def weighed(dataset: SampleSet) -> Weighed:
    """The data set, whose samples' costs are known.

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(dataset, Weighed):
        reason = f"what a sample of {type(dataset).__name__} costs is not known beforehand"
        raise ConfigError("data.balance", "cost", "use none", reason)
    return dataset


@dataclass(frozen=True)
class ChangedSamples(ABC):
    """Samples that are changed as they are read. They count what they did, unless a subclass says otherwise."""

    read: SampleSet

    @abstractmethod
    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """As of a :class:`SampleSet`."""

    def __len__(self) -> int:
        return len(self.read)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return self.read.valid_units(indices, numbers)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return self.read.positions(indices)

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.read.padding(indices)


class Prepared(ABC):
    """A data set made ready once, as what is known of it; workers read it as JSON."""

    kind: ClassVar[str]
    """Which implementation reads the JSON."""
    digest: str
    """Identity of the training data."""
    validation_digest: str
    """The same of held-out data of its own; empty where what is held out follows from the training data."""
    told: str = ""
    """What is worth knowing of the data; a note of the launcher's."""
    train_samples: int
    validation_samples: int
    """Held-out samples that an evaluation takes, ``data.validation_max_samples`` respected."""
    tokenizer_folder: Path | None
    """Holds tokenizer.json and tokenizer_config.json; None for data that is not text."""
    unigram_perplexity: float | None
    """Of the evaluated tokens, by their frequency alone; None for data that is not text."""

    @abstractmethod
    def open(self, config: RunConfig, split: Split) -> SampleSet:
        """The samples of a split.

        Raises:
            ValueError: nothing is held out, and the held-out split is asked for.
        """

    def order(self, config: RunConfig, samples: int) -> Order:
        """The run's order of its ``samples`` training samples."""
        return GlobalOrder(config.seed, samples)

    def source_tokens(self, config: RunConfig) -> Callable[[int, int], dict[str, int]] | None:
        """Of a mixture, what gives the tokens of each source in the run's samples ``first .. first + count - 1``."""
        return None

    @abstractmethod
    def evaluated_samples(self) -> NDArray[np.int64]:
        """Indices of the held-out samples that every evaluation takes, in order; shape ``(validation_samples,)``."""

    @abstractmethod
    def is_here(self) -> bool:
        """Whether this machine has what :meth:`open` reads."""

    @abstractmethod
    def amounts(self) -> list[tuple[int, str]]:
        """How much data there is: numbers and what they count, for people."""

    def context(self, config: RunConfig) -> float:
        """Tokens of the document that a token is part of, as far as its sample has them; their mean over tokens."""
        return float(config.data.seq_len)

    def model_fields(self) -> Mapping[str, Any]:
        """Fields of the model's configuration that the data decides."""
        return {}

    def complete(self, config: RunConfig) -> RunConfig:
        """``config`` with these fields."""
        return replace(config, model=replace(config.model, config={**config.model.config, **self.model_fields()}))

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """A form that JSON holds; :meth:`from_dict` reads it."""

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self: ...


def evaluated_samples(available: int, number: int) -> NDArray[np.int64]:
    """A keyed choice of ``number`` of the ``available`` held-out samples, ascending; the same in every run."""
    return np.sort(GlobalOrder(_EVALUATION_KEY, available).indices(0, number)) if number else np.zeros(0, np.int64)


def evaluation_numbers(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """What held-out samples count as: below 0, and the same at every evaluation."""
    return -1 - indices


def random_of(seed: int, number: int) -> np.random.Generator:
    """The random numbers of the sample that counts as ``number``: a pure function of both arguments."""
    mask = 0xFFFFFFFFFFFFFFFF
    return np.random.Generator(np.random.Philox(key=np.array([seed & mask, number & mask], np.uint64)))
