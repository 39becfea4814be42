"""Keys of a mixture of text sources, and the configuration of each source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast

from mgpu_pipe.config import plugins
from mgpu_pipe.config.plugins import CONVERSATION_SOURCES
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.config.sections import DATA
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.data.sources.document_sources import check_sources
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, raised_by

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
        return any(source.source in CONVERSATION_SOURCES for source in self.sources.values())

    def sample_text(self) -> str:
        shares = (f"{name} {100 * slots / SLOTS:g}%" for name, slots in slots_of(self).items())
        return f"{', '.join(shares)}; {super().sample_text()}"


def slots_of(data: MixtureConfig) -> dict[str, int]:
    """Slots of each source, by name in alphabetical order; they add up to :data:`SLOTS`."""
    names = sorted(data.sources)
    total = sum(data.sources[name].weight for name in names)
    exact = [SLOTS * data.sources[name].weight / total for name in names]
    slots = [int(share) for share in exact]
    most_cut = sorted(range(len(names)), key=lambda at: slots[at] - exact[at])
    for at in most_cut[: SLOTS - sum(slots)]:
        slots[at] += 1
    return dict(zip(names, slots, strict=True))


def source_configs(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yields each source as a separate run, by name in alphabetical order; weights divide the evaluated samples."""
    data = config.data
    assert isinstance(data, MixtureConfig)
    for name, slots in slots_of(data).items():
        most = data.validation_max_samples
        values = {key.name: getattr(data, key.name) for key in fields(DataConfig)}
        values |= {key.name: getattr(data.sources[name], key.name) for key in fields(MixtureSource)}
        del values["weight"]
        values["validation_max_samples"] = None if most is None else max(1, round(most * slots / SLOTS))
        yield name, replace(config, data=DataConfig(**values))


NAME = r"[\w.-]{1,32}"


def check_mixture(config: RunConfig) -> None:
    """Checks every source like :func:`mgpu_pipe.data.sources.document_sources.check_sources`.

    Raises:
        ConfigErrors: with the keys below ``data.sources``.
    """
    data = cast(MixtureConfig, config.data)
    if not data.sources:
        fix = "give at least one, e.g. 'data.sources={mine: {paths: [mine.jsonl]}}'"
        raise ConfigError("data.sources", "{}", fix)
    if any(source.weight <= 0 for source in data.sources.values()):
        return  # reported with the other ranges
    errors: list[BadInputError] = []
    for (name, source_config), slots in zip(source_configs(config), slots_of(data).values(), strict=True):
        where = f"data.sources.{name}"
        if re.fullmatch(NAME, name) is None:
            errors.append(
                ConfigError("data.sources", name, "use names of letters, digits, _, - and ., at most 32 long")
            )
        elif not slots:
            fix = f"use a larger one, or leave {name} out"
            errors.append(ConfigError(f"{where}.weight", data.sources[name].weight, fix, "is a share below 0.01%"))
        else:
            errors += [_below(where, error) for error in _errors(source_config)]
    if errors:
        raise ConfigErrors(errors)


def _errors(config: RunConfig) -> list[BadInputError]:
    data = config.data
    mixed = [name for name in plugins.DATA_SOURCES if name not in (*plugins.SAMPLES, "synthetic", "mixture")]
    others = [name for name in plugins.registered(plugins.DATA_GROUP) if DATA.keys(name) is DataConfig]
    if data.source not in (*mixed, *others):
        return [ConfigError("data.source", data.source, choose_from(data.source, mixed), "cannot be mixed")]
    reads = data.source in plugins.FILE_SOURCES
    if reads and not data.paths:
        return [ConfigError("data.paths", "[]", "give files or globs", f"source={data.source} reads files")]
    if data.paths and data.source in mixed and not reads:
        return [
            ConfigError("data.paths", ", ".join(data.paths), "leave it out", f"source={data.source} reads no files")
        ]
    errors = raised_by(lambda: check_sources(config))
    if not errors and reads and data.holds_conversations():
        from mgpu_pipe.data.text.chat_templates import check_chat  # imports numpy, which other forms do not need

        errors = raised_by(lambda: check_chat(config))
    return errors


def _below(where: str, error: BadInputError) -> BadInputError:
    """Moves an error's key to the one that the user wrote."""
    key = getattr(error, "key", "").removeprefix("data.")
    if not isinstance(error, ConfigError) or key not in ("source", "paths", "validation_paths"):
        return error
    return ConfigError(f"{where}.{key}", error.value, error.fix, error.reason)
