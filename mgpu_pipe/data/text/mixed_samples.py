"""Several text sources in one run, each with its own form and weight: ``data=mixture``.

Each source is prepared separately, with one tokenizer for all. Sample ``i`` of the run is a pure function of (seed, i):
every :data:`~mgpu_pipe.data.sources.mixture.SLOTS` samples are a permutation of slots. Each source has its share
of the slots, and its slots walk through the source's order of samples, epoch after epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, run_cache
from mgpu_pipe.data.order import GlobalOrder, Order
from mgpu_pipe.data.samples import Prepared, SampleSet, Split, require_costs
from mgpu_pipe.data.sources.mixture import SLOTS, MixtureConfig, slots_of, source_data
from mgpu_pipe.data.text.prepare_text import OpenedSource, PreparedData, prepare_opened
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer

if TYPE_CHECKING:
    import torch

KIND = "mixture"


class MixedOrder:
    """Maps the run's sample ``i`` to a sample of the mixture.

    Args:
        slots: of each source, by name; they add up to ``SLOTS``.
        sizes: samples of each source; the mixture concatenates the sources.
    """

    def __init__(self, seed: int, slots: Mapping[str, int], sizes: Sequence[int]) -> None:
        self._slots = GlobalOrder(seed, SLOTS)
        self._first_slot = np.cumsum([0, *slots.values()])
        self._first_sample = np.cumsum([0, *sizes])
        # Keyed by name: otherwise sources of equal size would have the same order.
        self._indices = [
            GlobalOrder(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big"), size)
            for name, size in zip(slots, sizes, strict=True)
        ]

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        slot = self._slots.indices(first, count)
        block = np.arange(first, first + count) // SLOTS
        source = np.searchsorted(self._first_slot, slot, side="right") - 1
        rows = np.empty(count, np.int64)
        for number, order in enumerate(self._indices):
            here = np.flatnonzero(source == number)
            begin, end = self._first_slot[number : number + 2]
            places = block[here] * (end - begin) + slot[here] - begin
            rows[here] = self._first_sample[number] + order.indices_of(places)
        return rows


@dataclass(frozen=True)
class MixedSamples:
    """Concatenated samples of all sources."""

    parts: tuple[SampleSet, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def source_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Source number of each sample."""
        return np.searchsorted(self._first(), indices, side="right") - 1

    def _first(self) -> NDArray[np.int64]:
        return np.cumsum([0, *map(len, self.parts)])[:-1]

    def _by_source(self, indices: NDArray[np.int64]) -> list[tuple[SampleSet, NDArray[np.int64], NDArray[np.int64]]]:
        """Sources with some of these samples, each with their rows in the batch and their indices in the source."""
        source, first = self.source_of(indices), self._first()
        rows = [np.flatnonzero(source == number) for number in range(len(self.parts))]
        return [
            (part, here, indices[here] - start)
            for part, here, start in zip(self.parts, rows, first, strict=True)
            if len(here)
        ]

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        mixed: dict[str, torch.Tensor] = {}
        for part, rows, places in self._by_source(indices):
            for name, values in part.batch(places, numbers[rows]).items():
                if name not in mixed:
                    mixed[name] = values.new_empty(len(indices), *values.shape[1:])
                mixed[name][rows] = values
        return mixed

    def valid_units(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
        return sum(part.valid_units(places, numbers[rows]) for part, rows, places in self._by_source(indices))

    def positions(self, indices: NDArray[np.int64]) -> int:
        return sum(part.positions(places) for part, _, places in self._by_source(indices))

    def costs(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        totals = np.zeros(len(indices), np.int64)
        for part, rows, places in self._by_source(indices):
            totals[rows] = require_costs(part).costs(places)
        return totals

    def padding(self, indices: NDArray[np.int64]) -> int:
        return sum(part.padding(places) for part, _, places in self._by_source(indices))


@dataclass(frozen=True)
class PreparedMixture(Prepared):
    """Prepared sources of a mixture; :func:`prepare_mixture` makes it."""

    kind: ClassVar[str] = KIND

    slots: dict[str, int]
    """See :func:`~mgpu_pipe.data.sources.mixture.slots_of`; the parts are in this order."""
    parts: tuple[PreparedData, ...]
    tokenizer_folder: Path
    train_samples: int
    validation_samples: int
    unigram_perplexity: float | None
    """Perplexity under the token frequencies of each evaluated token's source."""
    digest: str
    validation_digest: str
    too_long_samples: int = 0
    on_too_long: str = ""
    bad_samples: int = 0
    told: str = ""

    def open(self, config: RunConfig, split: Split) -> MixedSamples:
        return self.samples(split)

    def samples(self, split: Split) -> MixedSamples:
        if split == "validation" and not self.validation_samples:
            raise ValueError("this data holds nothing out")
        parts = [part for part in self.parts if split == "train" or part.validation is not None]
        return MixedSamples(tuple(part.samples(split) for part in parts))

    def order(self, seed: int, data: DataConfig, samples: int) -> Order:
        return MixedOrder(seed, self.slots, [part.train_samples for part in self.parts])

    def evaluated_text(self) -> tuple[int, int]:
        texts = [part.evaluated_text() for part in self.parts if part.validation_tokens]
        sizes = [size for _, size in texts]
        return sum(tokens for tokens, _ in texts), sum(sizes) if all(sizes) else 0

    def source_of(self, index: int) -> str:
        """Name of a training sample's source."""
        ends = np.cumsum([part.train_samples for part in self.parts])
        return list(self.slots)[int(np.searchsorted(ends, index, side="right"))]

    def source_tokens(self, seed: int, data: DataConfig) -> Callable[[int, int], dict[str, int]]:
        samples, order = self.samples("train"), self.order(seed, data, self.train_samples)

        def tokens_of_steps(first: int, count: int) -> dict[str, int]:
            indices = order.indices(first, count)
            source = samples.source_of(indices)
            by_source = [indices[source == number] for number in range(len(self.parts))]
            return {
                name: samples.positions(some) - samples.padding(some)
                for name, some in zip(self.slots, by_source, strict=True)
            }

        return tokens_of_steps

    def evaluated_samples(self) -> NDArray[np.int64]:
        chosen, first = [np.zeros(0, np.int64)], 0
        for part in self.parts:
            if part.validation is not None:
                chosen.append(first + part.evaluated_samples())
                first += part.validation.samples
        return np.concatenate(chosen)

    def is_here(self) -> bool:
        return all(part.is_here() for part in self.parts)

    def amounts(self) -> list[tuple[int, str]]:
        return [
            (sum(counts), what)
            for counts, what in (
                ([part.num_documents for part in self.parts], "documents"),
                ([part.num_tokens for part in self.parts], "tokens"),
            )
        ] + self.left_out()

    def too_long(self, data: DataConfig) -> str:
        notes = ((name, part.too_long(data)) for name, part in zip(self.slots, self.parts, strict=True))
        return "; ".join(f"{name}: {each}" for name, each in notes if each)

    def context(self, data: DataConfig) -> float:
        tokens = [part.context(data) * slots for part, slots in zip(self.parts, self.slots.values(), strict=True)]
        return sum(tokens) / SLOTS

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "parts": [part.as_dict() for part in self.parts]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PreparedMixture:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        parts = tuple(PreparedData.from_dict(part) for part in fields["parts"])
        return cls(**{**fields, "parts": parts, "tokenizer_folder": Path(fields["tokenizer_folder"])})


def prepare_mixture(config: RunConfig, progress: Progress | None = None) -> PreparedMixture:
    """Prepares every source with one tokenizer; see :func:`mgpu_pipe.data.text.prepare_text.prepare`."""
    report = progress or no_progress
    data = cast(MixtureConfig, config.data)
    slots = slots_of(data)
    with run_cache(data) as cache:
        opened = [OpenedSource.from_config(replace(config, data=part), cache, report) for _, part in source_data(data)]
        tokenizer = resolve_tokenizer(
            config.model,
            data,
            config.objective,
            [(source.config.data, source.source) for source in opened if source.source],
            cache,
            report,
        )
        parts = tuple(prepare_opened(source, tokenizer, cache, report) for source in opened)
    evaluated = [part for part in parts if part.unigram_perplexity is not None]
    tokens = sum(part.validation_tokens for part in evaluated)
    bits = sum(part.validation_tokens * math.log(part.unigram_perplexity or 1.0) for part in evaluated)
    return PreparedMixture(
        slots=slots,
        parts=parts,
        tokenizer_folder=tokenizer.folder,
        train_samples=sum(part.train_samples for part in parts),
        validation_samples=sum(part.validation_samples for part in parts),
        unigram_perplexity=math.exp(bits / tokens) if tokens else None,
        digest=digest_of(KIND, slots, [part.digest for part in parts]),
        too_long_samples=sum(part.too_long_samples for part in parts),
        bad_samples=sum(part.bad_samples for part in parts),
        on_too_long=", ".join(sorted({part.on_too_long for part in parts})),
        told="; ".join(f"{name}: {part.told}" for name, part in zip(slots, parts, strict=True) if part.told),
        validation_digest=digest_of(KIND, [part.validation_digest for part in parts])
        if any(part.validation_digest for part in parts)
        else "",
    )
