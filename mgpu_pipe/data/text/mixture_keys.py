"""Keys of a mixture of text sources, and the configuration of each source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.schema import DataConfig

SLOTS = 10_000
"""Samples in which every source has exactly its share."""


@dataclass
class MixtureSource:
    weight: float = field(default=1.0, metadata={"above": 0})
    """Its share of the samples is this over the sum of all weights, to a hundredth of a percent."""
    source: str = "jsonl"
    """As data.source: a source of text or of conversations."""
    paths: list[str] = field(default_factory=list)
    """As data.paths."""
    text_column: str = "text"
    """As data.text_column."""
    messages_column: str = "messages"
    """As data.messages_column."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion"] = "auto"
    """As data.format."""
    validation_paths: list[str] = field(default_factory=list)
    """As data.validation_paths; without them data.validation_fraction of this source is held out."""


@dataclass
class MixtureConfig(DataConfig):
    sources: dict[str, MixtureSource] = field(default_factory=dict)
    """The sources of data=mixture by a name of your choice; all other keys of data are shared by them."""

    def holds_conversations(self) -> bool:
        parts = (find_source(part.source) for part in self.sources.values())
        return any(source is not None and source.holds_conversations for source in parts)

    def parts(self) -> Mapping[str, MixtureSource]:
        return self.sources

    def sample_text(self) -> str:
        shares = (f"{name} {100 * slots / SLOTS:g}%" for name, slots in slots_of(self).items())
        return f"{', '.join(shares)}; {super().sample_text()}"


def slots_of(data: MixtureConfig) -> dict[str, int]:
    """Slots of each source, by name in alphabetical order; they add up to :data:`SLOTS`."""
    names = sorted(data.sources)
    total = sum(data.sources[name].weight for name in names)
    exact = [SLOTS * data.sources[name].weight / total for name in names]
    slots = [int(share) for share in exact]
    most_cut = sorted(range(len(names)), key=lambda index: slots[index] - exact[index])
    for index in most_cut[: SLOTS - sum(slots)]:
        slots[index] += 1
    return dict(zip(names, slots, strict=True))


def source_data(data: MixtureConfig) -> Iterator[tuple[str, DataConfig]]:
    """Yields each source's keys as those of a separate run, by name in alphabetical order.

    Weights divide the evaluated samples.
    """
    for name, slots in slots_of(data).items():
        most = data.validation_max_samples
        values = {key.name: getattr(data, key.name) for key in fields(DataConfig)}
        values |= {key.name: getattr(data.sources[name], key.name) for key in fields(MixtureSource)}
        del values["weight"]
        values["validation_max_samples"] = None if most is None else max(1, round(most * slots / SLOTS))
        yield name, DataConfig(**values)
