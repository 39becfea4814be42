"""``data=mixture``: several sources of text in one run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from mgpu_pipe.config import plugins
from mgpu_pipe.config.data_sources import TEXT_KEYS, all_sources, find_source
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.config.sections import DATA
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.data.data_source import DataSource, check_sources
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, raised_by

NAME = r"[\w.-]{1,32}"
SLOTS = 10_000
"""Samples in which every source has exactly its share."""


@dataclass
class MixtureSource:
    weight: float = field(default=1.0, metadata={"above": 0})
    """Its share of the samples is this over the sum of all weights, to a hundredth of a percent."""
    source: str = "jsonl"
    """Like data.source: a source of text or of conversations."""
    paths: list[str] = field(default_factory=list)
    """Like data.paths, for this source."""
    text_column: str = "text"
    """Like data.text_column, for this source."""
    messages_column: str = "messages"
    """Like data.messages_column, for this source."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion"] = "auto"
    """Like data.format, for this source."""
    validation_paths: list[str] = field(default_factory=list)
    """Like data.validation_paths, for this source; without them data.validation_fraction of it is held out."""


@dataclass
class MixtureConfig(DataConfig):
    sources: dict[str, MixtureSource] = field(default_factory=dict)
    """The sources of data=mixture by a name of your choice; they share all other keys of data."""

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
    """Yields each source's keys as those of a run, in order of names; weights divide the evaluated samples."""
    for name, slots in slots_of(data).items():
        most = data.validation_max_samples
        values = {key.name: getattr(data, key.name) for key in fields(DataConfig)}
        values |= {key.name: getattr(data.sources[name], key.name) for key in fields(MixtureSource)}
        del values["weight"]
        values["validation_max_samples"] = None if most is None else max(1, round(most * slots / SLOTS))
        yield name, DataConfig(**values)


def check_mixture(model: ModelConfig, data: DataConfig) -> None:
    """Checks every source by ``check_sources``; ConfigErrors with the keys below ``data.sources``."""
    assert isinstance(data, MixtureConfig)
    if not data.sources:
        fix = "give at least one, e.g. 'data.sources={mine: {paths: [mine.jsonl]}}'"
        raise ConfigError("data.sources", "{}", fix)
    if any(source.weight <= 0 for source in data.sources.values()):
        return  # reported with the other ranges
    errors: list[BadInputError] = []
    for (name, part), slots in zip(source_data(data), slots_of(data).values(), strict=True):
        where = f"data.sources.{name}"
        if re.fullmatch(NAME, name) is None:
            errors.append(
                ConfigError("data.sources", name, "use names of letters, digits, _, - and ., at most 32 long")
            )
        elif not slots:
            fix = f"use a larger one, or leave {name} out"
            errors.append(ConfigError(f"{where}.weight", data.sources[name].weight, fix, "is a share below 0.01%"))
        else:
            errors += [_below(where, error) for error in _errors(model, part)]
    if errors:
        raise ConfigErrors(errors)


def _errors(model: ModelConfig, data: DataConfig) -> list[BadInputError]:
    mixed = [source.name for source in all_sources() if isinstance(source, DataSource) and _can_be_mixed(source)]
    others = [name for name in plugins.entry_names(plugins.DATA_GROUP) if DATA.keys(name) is DataConfig]
    if data.source not in (*mixed, *others):
        return [ConfigError("data.source", data.source, choose_from(data.source, mixed), "cannot be mixed")]
    source = find_source(data.source)
    reads = source is not None and source.reads_files
    if reads and not data.paths:
        return [ConfigError("data.paths", "[]", "give files or globs", f"source={data.source} reads files")]
    if data.paths and data.source in mixed and not reads:
        return [
            ConfigError("data.paths", ", ".join(data.paths), "leave it out", f"source={data.source} reads no files")
        ]
    return raised_by(lambda: check_sources(model, data))


def _can_be_mixed(source: DataSource) -> bool:
    """Whether the source has documents of packed text, and no keys that a part of a mixture lacks."""
    return source.samples == "packed_text" and source.open is not None and source.keys is None


def _below(where: str, error: BadInputError) -> BadInputError:
    """Moves the key of an error below the source's key."""
    key = getattr(error, "key", "").removeprefix("data.")
    if not isinstance(error, ConfigError) or key not in ("source", "paths", "validation_paths"):
        return error
    return ConfigError(f"{where}.{key}", error.value, error.fix, error.reason)


SOURCE = DataSource(
    name="mixture", prepared="mixture", keys=MixtureConfig, reads=(*TEXT_KEYS, "numbers"), check=check_mixture
)
