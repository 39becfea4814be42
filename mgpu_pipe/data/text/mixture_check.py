"""What can be known to be wrong with a mixture before its sources are read. Imports neither torch nor numpy."""

from __future__ import annotations

import re
from typing import cast

from mgpu_pipe.config import plugins
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.config.sections import DATA
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.data.text.mixture_keys import MixtureConfig, slots_of, source_configs
from mgpu_pipe.data.text.sources import check_sources
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, raised_by

NAME = r"[\w.-]{1,32}"


def check_mixture(config: RunConfig) -> None:
    """Refuse what can be known to be wrong with a source; as :func:`mgpu_pipe.data.text.sources.check_sources`.

    Raises:
        ConfigErrors: with the keys below ``data.sources``.
    """
    data = cast(MixtureConfig, config.data)
    if not data.sources:
        fix = "give at least one, e.g. 'data.sources={mine: {paths: [mine.jsonl]}}'"
        raise ConfigError("data.sources", "{}", fix)
    if any(one.weight <= 0 for one in data.sources.values()):
        return  # told with the other ranges
    errors: list[BadInputError] = []
    for (name, own), slots in zip(source_configs(config), slots_of(data).values(), strict=True):
        where = f"data.sources.{name}"
        if re.fullmatch(NAME, name) is None:
            errors.append(
                ConfigError("data.sources", name, "use names of letters, digits, _, - and ., at most 32 long")
            )
        elif not slots:
            fix = f"use a larger one, or leave {name} out"
            errors.append(ConfigError(f"{where}.weight", data.sources[name].weight, fix, "is a share below 0.01%"))
        else:
            errors += [_below(where, error) for error in _errors(own)]
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
        from mgpu_pipe.data.text.chat_templates import check_chat  # numpy, which other forms do without

        errors = raised_by(lambda: check_chat(config))
    return errors


def _below(where: str, error: BadInputError) -> BadInputError:
    """The error with its key as the user wrote it."""
    key = getattr(error, "key", "").removeprefix("data.")
    if not isinstance(error, ConfigError) or key not in ("source", "paths", "validation_paths"):
        return error
    return ConfigError(f"{where}.{key}", error.value, error.fix, error.reason)
