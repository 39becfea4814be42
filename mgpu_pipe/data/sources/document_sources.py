"""Sources of documents: local files, the running Python's library, demonstrations, and plug-ins.

A source yields documents in a fixed order and has an identity: a hash of all its content. Installed packages add
sources: :mod:`mgpu_pipe.data.sources.plug_in`. ``synthetic`` makes tokens, not text:
:mod:`mgpu_pipe.data.sources.demo.synthetic`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from mgpu_pipe.config.plugins import (
    AUDIO_SOURCES,
    CAPTION_SOURCES,
    DATA_GROUP,
    DATA_SOURCES,
    FILE_SOURCES,
    IMAGE_SOURCES,
    PICTURE_CHAT_SOURCES,
    load,
    registered,
)
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.data.cache import Progress, digest_of, no_progress
from mgpu_pipe.data.sources.plug_in import Load, plug_in_source
from mgpu_pipe.data.sources.text_files import file_source
from mgpu_pipe.data.text.documents import Document, Source, refusing_bad
from mgpu_pipe.data.text.file_check import check_files
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

RULES: dict[str, Literal["chat", "text"]] = {"rule_chat": "chat", "rule_facts": "text"}
"""Sources of questions and facts made by rules, and the kind of their documents."""
MADE: dict[str, tuple[Literal["chat", "preferences", "pairs"], int]] = {
    "number_words": ("pairs", 2),
    "spoken_chat": ("chat", 2),
    "spoken_preferences": ("preferences", 1),
}
"""Sources made of ``data.numbers``: the kind of their documents, and documents per number."""
MADE_HERE = ("digits", "captioned_digits", "digit_questions", "moving_shapes", "spoken_digits")
READ_NO_PATHS = ("stdlib_text", *MADE, *RULES, "mixture", "synthetic", *MADE_HERE)


def source_names() -> list[str]:
    """Every name that ``data.source`` takes, plug-ins last."""
    return [*DATA_SOURCES, *sorted(set(registered(DATA_GROUP)) - set(DATA_SOURCES))]


def _plug_in(name: str) -> Load:
    """Loads the function that a package registers under ``name``.

    Raises:
        ConfigError: no such name, its package cannot be imported, or what it names is no function.
    """
    if name not in registered(DATA_GROUP):
        raise _unknown(name)
    loaded = load("data.source", name, DATA_GROUP)
    if not callable(loaded):
        fix = "register a function that takes the configuration and yields documents"
        raise ConfigError("data.source", name, fix, f"the entry point names a {type(loaded).__name__}")
    return loaded


def _unknown(name: str) -> ConfigError:
    names = source_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    return ConfigError("data.source", name, hint, "no such source")


def validation_source_config(config: RunConfig) -> RunConfig:
    """``config`` with the held-out files as ``data.paths``.

    Raises:
        ConfigError: the source reads no paths.
    """
    if config.data.source in READ_NO_PATHS:
        raise ConfigError(
            "data.validation_paths",
            config.data.validation_paths,
            "use data.validation_fraction",
            f"data.source={config.data.source} reads no paths",
        )
    return replace(config, data=replace(config.data, paths=config.data.validation_paths))


def check_sources(config: RunConfig) -> None:
    """Preflight checks of the data, without tokenising it: quick, and without torch.

    Checks that paths match, files are readable, nonempty and UTF-8 (the first 32 MiB), first rows have their column,
    and numbers are in range. Collects all errors.

    Raises:
        ConfigErrors: the errors found, as ConfigError and DataError.
    """
    data = config.data
    checks: list[Callable[[], object]] = [lambda: _check_numbers(data), lambda: check_rule(data)]
    if data.source in (*IMAGE_SOURCES, *CAPTION_SOURCES):
        from mgpu_pipe.data.images.check_images import check_pictures

        checks.append(lambda: check_pictures(config))
    elif data.source in PICTURE_CHAT_SOURCES:
        from mgpu_pipe.data.images.check_images import check_picture_chats

        checks.append(lambda: check_picture_chats(config))
    elif data.source in AUDIO_SOURCES:
        from mgpu_pipe.data.audio.check_recordings import check_recordings

        checks.append(lambda: check_recordings(config))
    elif data.source in FILE_SOURCES:
        checks.append(lambda: check_files(data, data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: check_files(data, data.validation_paths, "data.validation_paths"))
    elif data.source == "stdlib_text":
        checks.append(files.check_stdlib)
    elif data.source not in READ_NO_PATHS:
        checks.append(lambda: _plug_in(data.source))
    if data.validation_paths:
        checks.append(lambda: validation_source_config(config))
    errors: list[BadInputError] = []
    for check in checks:
        try:
            check()
        except ConfigErrors as several:
            errors += several.errors
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)


def _check_numbers(data: DataConfig) -> None:
    errors: list[BadInputError] = []
    if not 0 <= data.validation_fraction < 1:
        errors.append(
            ConfigError("data.validation_fraction", data.validation_fraction, "use a share of at least 0 and below 1")
        )
    if data.seq_len < 2:
        errors.append(ConfigError("data.seq_len", data.seq_len, "use at least 2: a token and the one that follows"))
    if data.validation_max_samples is not None and data.validation_max_samples < 1:
        errors.append(
            ConfigError(
                "data.validation_max_samples",
                data.validation_max_samples,
                "use at least 1, or null for all; data.validation_fraction=0 holds out none",
            )
        )
    if data.tokenize_workers != "auto" and data.tokenize_workers < 1:
        errors.append(ConfigError("data.tokenize_workers", data.tokenize_workers, "use at least 1, or auto"))
    if data.num_workers < 0:
        errors.append(ConfigError("data.num_workers", data.num_workers, "use 0 or more"))
    if data.source == "synthetic":
        shape = data.synthetic
        for name, value, least in (
            ("num_documents", shape.num_documents, 1),
            ("mean_length", shape.mean_length, 2),
            ("sigma", shape.sigma, 0),
        ):
            if value < least:
                errors.append(ConfigError(f"data.synthetic.{name}", value, f"use at least {least}"))
    if errors:
        raise ConfigErrors(errors)


def open_source(config: RunConfig, cache: Path, progress: Progress = no_progress, key: str = "data.paths") -> Source:
    """Opens the source that ``config.data`` names and hashes its content; ``key`` names its paths in errors.

    With ``data.on_bad_sample=stop`` a document that cannot be used raises a DataError when it is reached.

    Raises:
        ConfigError: an unknown source, or paths that match nothing.
        DataError: a file that is missing, empty or unreadable, with ``data.on_bad_sample=stop``.
    """
    source = _source(config, cache, progress, key)
    return source if config.data.on_bad_sample == "skip" else refusing_bad(source)


def _source(config: RunConfig, cache: Path, progress: Progress, key: str) -> Source:
    data = config.data
    if data.source == "stdlib_text":
        return file_source(data, files.stdlib_files(), cache, progress)
    if data.source in FILE_SOURCES:
        return file_source(data, files.expand_paths(data.paths, key), cache, progress)
    if data.source in MADE:
        return _number_source(data)
    if data.source in RULES:
        return _rule_source(data.source)
    return plug_in_source(config, _plug_in(data.source))


def _rule_source(name: str) -> Source:
    from mgpu_pipe.data.sources.demo import rules  # imports numpy, which check does not load

    return Source(name, rules.IDENTITY[name], 0, lambda: rules.rule_documents(name), RULES[name])


def _number_source(data: DataConfig) -> Source:
    kind, each = MADE[data.source]

    def documents() -> Iterator[Document]:
        if kind != "pairs":
            from mgpu_pipe.data.sources.demo.numbers import spoken_documents  # imports numpy, which check does not load

            yield from spoken_documents(data.source, data.numbers)
            return
        from mgpu_pipe.data.sources.demo.numbers import number_pairs

        for digits, source, target in number_pairs(data.numbers):
            yield Document(source, f"data.source={data.source}: {digits}", 1, target, digits)

    return Source(data.source, digest_of(data.source, asdict(data.numbers)), each * data.numbers.count, documents, kind)
