"""``data=mixture``: several sources of text in one run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mgpu_pipe.config import plugins
from mgpu_pipe.config.data_sources import TEXT_KEYS, all_sources, find_source
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.config.sections import DATA
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource, check_sources
from mgpu_pipe.data.text.mixture_keys import MixtureConfig, slots_of, source_data
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, raised_by

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


NAME = r"[\w.-]{1,32}"


def check_mixture(model: ModelConfig, data: DataConfig) -> None:
    """Checks every source like :func:`mgpu_pipe.data.data_source.check_sources`.

    Raises:
        ConfigErrors: with the keys below ``data.sources``.
    """
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
    others = [name for name in plugins.registered(plugins.DATA_GROUP) if DATA.keys(name) is DataConfig]
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
    """Moves an error's key to the one that the user wrote."""
    key = getattr(error, "key", "").removeprefix("data.")
    if not isinstance(error, ConfigError) or key not in ("source", "paths", "validation_paths"):
        return error
    return ConfigError(f"{where}.{key}", error.value, error.fix, error.reason)


def prepare(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text.mixed_samples import prepare_mixture

    return prepare_mixture(config, progress)


SOURCE = DataSource(
    name="mixture", keys=MixtureConfig, reads=(*TEXT_KEYS, "numbers"), check=check_mixture, prepare=prepare
)
