"""Data set interfaces: samples by index with known valid units, and an identity.

The loader reads a :class:`SampleSet`; the launcher makes a :class:`Prepared` and passes it to the workers. Packed text
(:mod:`mgpu_pipe.data.text`) is one implementation, dictionaries of arrays (:mod:`mgpu_pipe.data.arrays`) another.

Load balancing (``data.balance``) assigns the samples of a step to processes and micro-batches. A step consumes the same
samples in any assignment, and its loss and gradients are sums over them. Costs (:class:`SampleCosts`) are known before
reading, so every process computes the same assignment on its own.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data.bad_samples import describe_too_long
from mgpu_pipe.data.order import GlobalOrder, Order
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.topology import BatchPlan

if TYPE_CHECKING:
    import torch


Split = Literal["train", "validation"]
_EVALUATION_KEY = 0x5EED
"""Key of the choice of evaluated samples. It is not the run's seed, so evaluations of different runs are comparable."""


class SampleSet(Protocol):
    """Samples of one split. Another process opens the split itself (``__reduce__``).

    ``indices`` are the samples' places in the set, ``numbers`` their numbers in the run: a sample's random numbers
    depend on the seed and its number only. Both have shape ``(rows,)``.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Stacks the samples: tensors whose first dimension is ``rows``."""

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        """Units that the samples add to the loss denominator, without reading them."""

    def positions(self, indices: NDArray[np.int64]) -> int:
        """Positions that the model computes for these samples, padding included; 0 where they are not counted."""

    def padding(self, indices: NDArray[np.int64]) -> int:
        """Positions of padding."""


@runtime_checkable
class SampleCosts(Protocol):
    """A :class:`SampleSet` whose samples differ in cost."""

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cost of each sample beyond the common part, in units of the set; shape ``(rows,)``."""


def require_costs(dataset: SampleSet) -> SampleCosts:
    """Returns the data set as :class:`SampleCosts`; ConfigError if its samples' costs are not known."""
    if not isinstance(dataset, SampleCosts):
        reason = f"the cost of a sample of {type(dataset).__name__} is unknown before reading"
        raise ConfigError("data.balance", "cost", "use none", reason)
    return dataset


@dataclass(frozen=True)
class ChangedSamples(ABC):
    """Samples that are changed as they are read. Their counts stay unless a subclass overrides them."""

    read: SampleSet

    @abstractmethod
    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Stacks the changed samples, see :class:`SampleSet`."""

    def __len__(self) -> int:
        return len(self.read)

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return self.read.valid_units(indices, numbers)

    def positions(self, indices: NDArray[np.int64]) -> int:
        return self.read.positions(indices)

    def padding(self, indices: NDArray[np.int64]) -> int:
        return self.read.padding(indices)


class Prepared(ABC):
    """Facts of a prepared data set; workers read them as JSON."""

    kind: ClassVar[str]
    """Name of the implementation that reads the JSON."""
    digest: str
    """Identity of the training data."""
    validation_digest: str
    """Identity of separate held-out data; empty where the training data decides the split."""
    bad_samples: int = 0
    """Unusable samples of both splits that are left out, with ``data.on_bad_sample=skip``."""
    told: str = ""
    """Notice about the data that the launcher prints."""
    too_long_samples: int = 0
    """Samples of both splits that do not fit; ``data.on_too_long`` decides about them."""
    on_too_long: str = ""
    """``data.on_too_long`` with auto resolved; empty where samples have no length."""
    train_samples: int
    validation_samples: int
    """Held-out samples of an evaluation, at most ``data.validation_max_samples``."""
    tokenizer_folder: Path | None
    """Folder of tokenizer.json and tokenizer_config.json; None for data other than text."""
    unigram_perplexity: float | None
    """Perplexity of the evaluated tokens under their frequencies; None for data other than text."""

    @abstractmethod
    def open(self, config: RunConfig, split: Split) -> SampleSet:
        """Opens the samples of a split; ValueError for a held-out split of nothing."""

    def order(self, seed: int, data: DataConfig, samples: int) -> Order:
        """Order of the run over its ``samples`` training samples."""
        return GlobalOrder(seed, samples)

    def source_tokens(self, seed: int, data: DataConfig) -> Callable[[int, int], dict[str, int]] | None:
        """Function from ``(first, count)`` to the tokens of each source in these samples; None without a mixture."""
        return None

    def evaluated_text(self) -> tuple[int, int]:
        """Valid tokens of one evaluation, and bytes of their text; 0 bytes where these are not known."""
        return 0, 0

    @abstractmethod
    def evaluated_samples(self) -> NDArray[np.int64]:
        """Indices of the held-out samples of every evaluation, in order; shape ``(validation_samples,)``."""

    @abstractmethod
    def is_here(self) -> bool:
        """Whether this machine has the files that :meth:`open` reads."""

    @abstractmethod
    def amounts(self) -> list[tuple[int, str]]:
        """Amounts of data for people: numbers and what they count."""

    def left_out(self) -> list[tuple[int, str]]:
        """Unusable samples as an entry of :meth:`amounts`; empty without any."""
        return [(self.bad_samples, "left out")] if self.bad_samples else []

    def too_long(self, data: DataConfig) -> str:
        """Describes how many samples do not fit and what happens to them; empty where all fit."""
        if not self.too_long_samples:
            return ""
        limit = f"data.seq_len={data.seq_len}"
        return describe_too_long(self.too_long_samples, self.amounts()[0][1], self.on_too_long, limit)

    def context(self, data: DataConfig) -> float:
        """Mean over tokens of the length of a token's document within its sample."""
        return float(data.seq_len)

    def model_fields(self) -> Mapping[str, Any]:
        """Model configuration fields that the data decides."""
        return {}

    def complete(self, config: RunConfig) -> RunConfig:
        """``config`` with the fields that the data and the objective decide."""
        folder, objective = self.tokenizer_folder, config.objective
        completed = objective if folder is None else objective.with_tokenizer(folder)
        return replace(config, model=self.complete_model(config.model, objective), objective=completed)

    def complete_model(self, model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
        """``model`` with the fields that the data and the objective decide."""
        return replace(model, config={**model.config, **self.model_fields(), **objective.model_fields()})

    def as_dict(self) -> dict[str, Any]:
        """JSON form; :meth:`from_dict` reads it."""
        fields: Any = self  # every subclass is a dataclass
        return {"kind": self.kind, **_plain(asdict(fields))}

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self: ...


def _plain(value: Any) -> Any:
    """``value`` with paths as texts."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, Path) else value


def evaluated_samples(available: int, number: int) -> NDArray[np.int64]:
    """Chooses ``number`` of the ``available`` held-out samples by a fixed key, ascending; equal in every run."""
    return np.sort(GlobalOrder(_EVALUATION_KEY, available).indices(0, number)) if number else np.zeros(0, np.int64)


def evaluation_numbers(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of held-out samples: negative, and equal at every evaluation."""
    return -1 - indices


def random_of(seed: int, number: int) -> np.random.Generator:
    """Random numbers of the sample with this number: a pure function of both arguments."""
    mask = 0xFFFFFFFFFFFFFFFF
    return np.random.Generator(np.random.Philox(key=np.array([seed & mask, number & mask], np.uint64)))


MEASURED_STEPS = 20
"""First steps of a run whose balance is measured."""
Ints = NDArray[np.int64]


def deal(costs: Ints, plan: BatchPlan) -> Ints:
    """Orders a step's samples for the processes: each takes a contiguous share, micro-batch after micro-batch.

    Each sample goes to the cheapest micro-batch with room, the costliest sample first; so do micro-batches to processes
    (longest processing time first: Graham 1969). A process begins with its costliest micro-batch, so that simultaneous
    micro-batches cost about the same.

    Args:
        costs: of each sample of the step; shape ``(global_batch_size,)``.
    """
    size, processes = plan.micro_batch_size, plan.data_parallel_size
    micro_batches = _to_cheapest(costs, len(costs) // size)
    shares = _to_cheapest(costs[micro_batches].sum(1), processes)
    return micro_batches[shares].reshape(-1)


def imbalance(costs: Ints, plan: BatchPlan) -> float:
    """Work of the busiest process over the mean of all; ``costs`` are in the order of :func:`deal`."""
    shares = costs.reshape(plan.data_parallel_size, -1).sum(1)
    return float(shares.max() / shares.mean()) if shares.any() else 1.0


def describe_imbalance(objective: ObjectiveConfig, plan: BatchPlan) -> str:
    """Describes in words the work that :func:`imbalances` compares."""
    what = "pictures" if description(objective.name).samples == "picture_chats" else "attention"
    return f"{what} of the busiest of {plan.data_parallel_size} processes over their mean"


def imbalances(samples: SampleSet, order: Order, plan: BatchPlan) -> tuple[float, float] | None:
    """Mean :func:`imbalance` of the first :data:`MEASURED_STEPS` steps in the run's order and by cost, or None."""
    if plan.data_parallel_size == 1 or not isinstance(samples, SampleCosts):
        return None
    size = plan.global_batch_size
    steps = [samples.costs(order.indices(step * size, size)) for step in range(MEASURED_STEPS)]
    by_cost = [imbalance(costs[deal(costs, plan)], plan) for costs in steps]
    return float(np.mean([imbalance(costs, plan) for costs in steps])), float(np.mean(by_cost))


def _to_cheapest(costs: Ints, parts: int) -> Ints:
    """Assigns items to parts of equal number, the costliest of a part first; shape ``(parts, items of each)``."""
    room = len(costs) // parts
    items_of: list[list[int]] = [[] for _ in range(parts)]
    with_room = [(0, part) for part in range(parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(with_room)
        items_of[part].append(item)
        if len(items_of[part]) < room:
            heapq.heappush(with_room, (total + int(costs[item]), part))
    return np.array(items_of, np.int64)
