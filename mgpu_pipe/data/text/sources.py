"""Where documents come from: local files, the running Python's library, and plug-ins.

A source yields one document after another, always in the same order, and has an identity: a hash of all
content it will yield. Installed packages add sources: :mod:`mgpu_pipe.data.text.plug_in`. ``synthetic`` makes tokens,
not text: :mod:`mgpu_pipe.data.text.synthetic`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.config.hub import DATA
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
from mgpu_pipe.data.cache import Progress, digest_of, no_progress
from mgpu_pipe.data.compressed import codec_of, identity_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, forget
from mgpu_pipe.data.text.conversations import messages_of
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.labelled_row import row_of
from mgpu_pipe.data.text.plug_in import Load, plug_in_source
from mgpu_pipe.data.text.preference_row import preference_of, prompt_of
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError

RULES: dict[str, Literal["chat", "text"]] = {"rule_chat": "chat", "rule_facts": "text"}
"""Sources of questions and facts made by rules: what their documents are."""
MADE: dict[str, tuple[Literal["chat", "preferences", "pairs"], int]] = {
    "number_words": ("pairs", 2),
    "spoken_chat": ("chat", 2),
    "spoken_preferences": ("preferences", 1),
}
"""Sources made of ``data.numbers`` by a rule: what their documents are, and how many each number gives."""
MADE_HERE = ("digits", "captioned_digits", "digit_questions", "moving_shapes", "spoken_digits")
READ_NO_PATHS = ("stdlib_text", *MADE, *RULES, "mixture", "synthetic", *MADE_HERE)
# The preflight decodes at most this much; preparation decodes everything, also before a worker starts.
_CHECKED_BYTES = 32 << 20


def source_names() -> list[str]:
    """Every name that ``data.source`` takes, plug-ins last."""
    return [*DATA_SOURCES, *sorted(set(registered(DATA_GROUP)) - set(DATA_SOURCES))]


def _plug_in(name: str) -> Load:
    """The function that a package registers under ``name``; the package is imported.

    Raises:
        ConfigError: no such name, its package cannot be imported, or what it names is no function.
    """
    if name not in registered(DATA_GROUP):
        raise _unknown(name)
    found = load("data.source", name, DATA_GROUP)
    if not callable(found):
        fix = "register a function that takes the configuration and yields documents"
        raise ConfigError("data.source", name, fix, f"the entry point names a {type(found).__name__}")
    return found


def _unknown(name: str) -> ConfigError:
    names = source_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    return ConfigError("data.source", name, hint, "no such source")


def validation_source_config(config: RunConfig) -> RunConfig:
    """The configuration whose ``data.paths`` are the held-out files.

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
    """What can be known to be wrong with the data without tokenising it: quick and torch-free.

    Paths match, files can be read, are not empty and (the first 32 MiB) UTF-8, first rows have their column, numbers
    are in range. All errors are collected.

    Raises:
        ConfigErrors: the errors found, as ConfigError and DataError.
    """
    data = config.data
    checks: list[Callable[[], object]] = [lambda: _check_numbers(data)]
    if data.source in (*IMAGE_SOURCES, *CAPTION_SOURCES):
        from mgpu_pipe.data.image.check import check_pictures

        checks.append(lambda: check_pictures(config))
    elif data.source in PICTURE_CHAT_SOURCES:
        from mgpu_pipe.data.image.check import check_picture_chats

        checks.append(lambda: check_picture_chats(config))
    elif data.source in AUDIO_SOURCES:
        from mgpu_pipe.data.audio.check import check_recordings

        checks.append(lambda: check_recordings(config))
    elif data.source in FILE_SOURCES:
        checks.append(lambda: _check_files(data, data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: _check_files(data, data.validation_paths, "data.validation_paths"))
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


def _check_files(data: DataConfig, patterns: list[str], key: str) -> None:
    budget = _CHECKED_BYTES
    errors: list[BadInputError] = []
    here = [pattern for pattern in patterns if not pattern.startswith(DATA)]  # others are looked into once fetched
    for path in files.expand_paths(here, key) if here or not patterns else ():
        try:
            size = files.check_readable(path)
            if budget > 0:
                _check_content(data, path, size <= budget and codec_of(path) is None)
            budget -= size
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)


def _check_content(data: DataConfig, path: Path, whole: bool) -> None:
    """Look into one file; a file that is larger than the budget is looked into at its beginning only."""
    if data.source == "parquet":
        with open(path, "rb") as file:
            if file.read(4) != b"PAR1":
                raise DataError(f"{path}: is not a readable Parquet file: it does not begin with PAR1; {files.REPLACE}")
        return
    if whole:
        files.decode(files.read_bytes(path), str(path))
    if data.source == "text_files" and codec_of(path) is None:
        return
    line, origin, _ = next(files.read_lines(path))
    if data.source == "text_files":
        return
    if data.source == "labelled_jsonl":
        row_of(data, line, origin)
        return
    names = {
        "pairs_jsonl": ("source_column", "target_column"),
        **dict.fromkeys(("chat_jsonl", "preferences_jsonl"), ("messages_column",)),
    }.get(data.source, ("text_column",))
    row = files.json_row(line, origin, *(getattr(data, name) for name in names))
    if data.source == "chat_jsonl":
        messages_of(row, origin, data.messages_column, data.format)
        return
    if data.source == "preferences_jsonl":
        preference_of(row, origin, data.messages_column)
        return
    for name in names:
        column = getattr(data, name)
        if column not in row:
            raise files.missing_column(origin, f"data.{name}", column, list(row))


def open_source(config: RunConfig, cache: Path, progress: Progress = no_progress, key: str = "data.paths") -> Source:
    """The source that ``config.data`` names, its content hashed; ``key`` is where its paths come from.

    Raises:
        ConfigError: an unknown source, or paths that match nothing.
        DataError: a file that is missing, empty or unreadable.
    """
    data = config.data
    if data.source == "stdlib_text":
        return _file_source(data, files.stdlib_files(), cache, progress)
    if data.source in FILE_SOURCES:
        return _file_source(data, files.expand_paths(data.paths, key), cache, progress)
    if data.source in MADE:
        return _number_source(data)
    if data.source in RULES:
        return _rule_source(data.source)
    return plug_in_source(config, _plug_in(data.source))


def _file_source(data: DataConfig, paths: list[Path], cache: Path, progress: Progress) -> Source:
    known = fingerprints(paths, cache, progress)
    column: dict[str, Any] = {
        "jsonl": data.text_column,
        "parquet": data.text_column,
        "chat_jsonl": data.messages_column if data.format == "auto" else [data.messages_column, data.format],
        "preferences_jsonl": ["preferences", data.messages_column],
        "pairs_jsonl": [data.source_column, data.target_column],
    }
    kinds: dict[str, Literal["chat", "preferences", "pairs"]] = {
        "chat_jsonl": "chat",
        "preferences_jsonl": "preferences",
        "pairs_jsonl": "pairs",
    }
    readers: dict[str, Callable[[Path], Iterator[Document]]] = {
        "jsonl": lambda path: _jsonl(path, data.text_column, known[path]),
        "parquet": lambda path: (
            Document(*row) for row in files.parquet_rows(path, data.text_column, expected=known[path])
        ),
        "chat_jsonl": lambda path: (Document(*row) for row in files.read_lines(path, known[path])),
        "preferences_jsonl": lambda path: _preferences_jsonl(path, data.messages_column, known[path]),
        "pairs_jsonl": lambda path: _pairs_jsonl(path, data, known[path]),
    }
    read = readers.get(data.source, lambda path: _whole_file(path, known[path]))
    # A text file is a document whatever the source is called.
    form = data.source if data.source in readers else "text_files"

    def documents() -> Iterator[Document]:
        try:
            for path in paths:
                yield from read(path)
        except ChangedFileError:
            forget(paths, cache)
            raise

    return Source(
        name=data.source,
        identity=digest_of("files", form, column.get(data.source), [identity_of(path, known[path]) for path in paths]),
        size=sum(known[path].size for path in paths),
        documents=documents,
        kind=kinds.get(data.source, "text"),
    )


def _whole_file(path: Path, expected: Fingerprint) -> Iterator[Document]:
    raw = files.read_bytes(path, expected)
    yield Document(files.decode(raw, str(path)), str(path), expected.size)


def _jsonl(path: Path, column: str, expected: Fingerprint) -> Iterator[Document]:
    for line, origin, size in files.read_lines(path, expected):
        yield Document(_text_of(files.json_row(line, origin, column), "data.text_column", column, origin), origin, size)


def _pairs_jsonl(path: Path, data: DataConfig, expected: Fingerprint) -> Iterator[Document]:
    for line, origin, size in files.read_lines(path, expected):
        row = files.json_row(line, origin, data.source_column, data.target_column)
        source = _text_of(row, "data.source_column", data.source_column, origin)
        target = _text_of(row, "data.target_column", data.target_column, origin)
        for column, text in ((data.source_column, source), (data.target_column, target)):
            if not text:
                raise DataError(f"{origin}: column '{column}' is empty; {files.FIX}")
        yield Document(source, origin, size, target)


def _preferences_jsonl(path: Path, column: str, expected: Fingerprint) -> Iterator[Document]:
    for line, origin, size in files.read_lines(path, expected):
        chosen, _ = preference_of(files.json_row(line, origin, column), origin, column)
        yield Document(line, origin, size, key=prompt_of(chosen))


def _text_of(row: dict[str, Any], key: str, column: str, origin: str) -> str:
    if column not in row:
        raise files.missing_column(origin, key, column, list(row))
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{origin}: column '{column}' holds {type(text).__name__}, not a string; {files.FIX}")
    files.check_unicode(text, origin)
    return text


def _rule_source(name: str) -> Source:
    from mgpu_pipe.data.text import rules  # numpy, which check does without

    identity = digest_of(name, Path(rules.__file__).read_text(encoding="utf-8"))
    return Source(name, identity, 0, lambda: rules.rule_documents(name), RULES[name])


def _number_source(data: DataConfig) -> Source:
    kind, each = MADE[data.source]

    def documents() -> Iterator[Document]:
        if kind != "pairs":
            from mgpu_pipe.data.text.spoken import spoken_documents  # numpy, which check does without

            yield from spoken_documents(data.source, data.numbers)
            return
        from mgpu_pipe.data.text.numbers import number_pairs

        for digits, source, target in number_pairs(data.numbers):
            yield Document(source, f"data.source={data.source}: {digits}", 1, target, digits)

    return Source(data.source, digest_of(data.source, asdict(data.numbers)), each * data.numbers.count, documents, kind)
