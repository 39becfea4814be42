"""A data source: its declaration, its checks, its preparation and its documents.

A shipped source is a ``SOURCE`` in a module of ``data/sources``. A source of text yields documents in a fixed order and
has an identity: a hash of all its content.

A plug-in is a callable that an installed package registers in the entry point group ``mgpu_pipe.data``. It takes the
:class:`RunConfig` and returns an iterable of documents, all of one kind: ``str``, or token ids of ``data.tokenizer`` as
a NumPy array of whole numbers, or a pair of such an array and a loss mask of its length (1 where a token is a label).
An attribute ``fingerprint`` (RunConfig to str) gives the documents' identity; otherwise every document is read once
more to hash it. With ``data.validation_paths`` the callable gets those as ``data.paths`` for the held-out documents.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mgpu_pipe.config.data_sources import SourceDeclaration, find_source, source_names
from mgpu_pipe.config.plugins import DATA_GROUP, entry_names, load
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault, check_rule
from mgpu_pipe.data.cache import Progress, digest_of, no_progress
from mgpu_pipe.data.text.documents import Document, Source, refuse_bad
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError, check_all

_TEXT = str.__name__
Load = Callable[[RunConfig], Iterable[Any]]


def plug_in_source(data: DataConfig, load: Callable[[], Iterable[Any]], fingerprint: object = None) -> Source:
    """Builds the source of the documents that ``load`` yields.

    With ``data.on_bad_sample=skip`` an item that is not a document, or of another kind than the first, becomes a
    document with a fault.

    Args:
        fingerprint: identity of the documents; without one they are read once more to hash them.

    Raises:
        DataError: there is such an item, with ``data.on_bad_sample=stop``.
    """
    name = data.source
    skips = data.on_bad_sample == "skip"
    first = _kind(next((item for item in load() if not skips or _is_document(item)), ""))

    def documents() -> Iterator[Document]:
        for number, item in enumerate(load()):
            origin = f"data.source={name}: document {number}"
            try:
                if _kind(item) != first:
                    raise DataError(f"{origin} is {_kind(item)}, the first {first}; yield documents of the same kind")
                document = _document(item, origin)
            except DataError as error:
                if not skips:
                    raise DataError(f"{error}{OR_SKIP}") from error
                document = Document.from_fault(Fault(str(error), origin, 1))
            yield document

    def stream(identity: str, size: int, documents: Callable[[], Iterator[Document]]) -> Source:
        return Source(
            name, digest_of("plug-in", name, identity), size, documents, "text" if first == _TEXT else "tokens"
        )

    if fingerprint is not None:
        return stream(str(fingerprint), 0, documents)
    expected, count = hashlib.sha256(), 0
    for document in documents():
        _add(expected, document)
        count += 1
    identity = expected.hexdigest()
    return stream(identity, count, lambda: _require_identity(documents(), identity, name))


def _require_identity(documents: Iterator[Document], identity: str, name: str) -> Iterator[Document]:
    """Yields the documents, then raises DataError if their digest is not ``identity``."""
    digest = hashlib.sha256()
    for document in documents:
        _add(digest, document)
        yield document
    if digest.hexdigest() != identity:
        raise DataError(
            f"data.source={name}: yields other documents than the first time; yield the same ones, or set its "
            "attribute fingerprint"
        )


def _kind(item: object) -> str:
    """Kind of a document in messages."""
    import numpy as np

    if isinstance(item, tuple):
        return "token ids with a loss mask"
    return "token ids" if isinstance(item, np.ndarray) else type(item).__name__


def _is_document(item: object) -> bool:
    try:
        _document(item, "")
    except DataError:
        return False
    return True


def _document(item: Any, origin: str) -> Document:
    if isinstance(item, str):
        files.check_unicode(item, origin)
        return Document(item, origin, 1)
    import numpy as np

    tokens, mask = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        what = f"{type(item).__name__}, not str, nor a NumPy array of token ids in one dimension"
        raise DataError(f"{origin} is {what}, nor a pair of such an array and its loss mask; yield one of these")
    if mask is not None:
        mask = np.asarray(mask)
        if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
            raise DataError(f"{origin}: its loss mask must hold one 0 or 1 for each of its {len(tokens)} tokens")
        mask = mask.astype(np.uint8)
    return Document("", origin, 1, tokens=tokens.astype(np.int64), loss_mask=mask)


def _add(digest: Any, document: Document) -> None:
    digest.update(len(document.content).to_bytes(8, "little") + document.content)


def pass_check(model: ModelConfig, data: DataConfig) -> None:
    """Check of a source that generates its documents and needs nothing else."""


@dataclass(frozen=True, kw_only=True)
class DataSource(SourceDeclaration):
    """A shipped source. Its module imports neither torch nor numpy before a function is called.

    Attributes:
        check: preflight check of what the source reads, without tokenising it; raises what is wrong.
        prepared: kind of its prepared data (``Prepared.kind``); empty: that of its samples.
        open: opens its documents, given the cache folder, a progress callback and the key that names its paths in
            errors; None where its samples are not made of documents.
        labels: yields the class of each training sample, before preparation; None where there is none, or finding it
            takes long.
    """

    check: Callable[[ModelConfig, DataConfig], None] = pass_check
    prepared: str = ""
    open: Callable[[DataConfig, Path, Progress, str], Source] | None = None
    labels: Callable[[DataConfig], Iterator[str]] | None = None


def shipped_source(name: str) -> DataSource | None:
    """The shipped source of this name; None for a plug-in's or an unknown name."""
    source = find_source(name)
    assert source is None or isinstance(source, DataSource)
    return source


def all_names() -> list[str]:
    """Every name that ``data.source`` takes, plug-ins last."""
    return [*source_names(), *sorted(set(entry_names(DATA_GROUP)) - set(source_names()))]


def _plug_in(name: str) -> Load:
    """Loads the function that a package registers under ``name``; ConfigError if it is none."""
    if name not in entry_names(DATA_GROUP):
        raise _unknown(name)
    loaded = load("data.source", name, DATA_GROUP)
    if not callable(loaded):
        fix = "register a function that takes the configuration and yields documents"
        raise ConfigError("data.source", name, fix, f"the entry point names a {type(loaded).__name__}, not a function")
    return loaded


def _unknown(name: str) -> ConfigError:
    names = all_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    return ConfigError("data.source", name, hint, "no such source")


def held_out_data(data: DataConfig) -> DataConfig:
    """``data`` with the held-out files as ``data.paths``; ConfigError if the source reads no paths."""
    source = find_source(data.source)
    if source is not None and not source.reads_files:
        raise ConfigError(
            "data.validation_paths",
            data.validation_paths,
            "use data.validation_fraction",
            f"data.source={data.source} reads no paths",
        )
    return replace(data, paths=data.validation_paths)


def check_sources(model: ModelConfig, data: DataConfig) -> None:
    """Preflight checks of the data, without tokenising it: quick, and without torch.

    Checks that paths match, files are readable, nonempty and UTF-8 (the first 32 MiB), first rows have their column,
    and numbers are in range. Collects all errors.

    Raises:
        ConfigErrors: the errors found, as ConfigError and DataError.
    """
    source = shipped_source(data.source)
    checks: list[Callable[[], object]] = [lambda: _check_numbers(data), lambda: check_rule(data)]
    checks.append((lambda: source.check(model, data)) if source else lambda: _plug_in(data.source))
    if data.validation_paths:
        checks.append(lambda: held_out_data(data))
    check_all(checks)


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
    if errors:
        raise ConfigErrors(errors)


def open_source(config: RunConfig, cache: Path, progress: Progress = no_progress, key: str = "data.paths") -> Source:
    """Opens the source that ``config.data`` names and hashes its content; ``key`` names its paths in errors.

    With ``data.on_bad_sample=stop`` a document that cannot be used raises a DataError when it is reached.

    Raises:
        ConfigError: an unknown source, or paths that match nothing.
        DataError: a file that is missing, empty or unreadable, with ``data.on_bad_sample=stop``.
    """
    if shipped_source(config.data.source) is not None:
        return open_shipped(config.data, cache, progress, key)
    plug_in = _plug_in(config.data.source)
    fingerprint = plug_in.fingerprint(config) if hasattr(plug_in, "fingerprint") else None
    source = plug_in_source(config.data, partial(plug_in, config), fingerprint)
    return source if config.data.on_bad_sample == "skip" else refuse_bad(source)


def open_shipped(data: DataConfig, cache: Path, progress: Progress = no_progress, key: str = "data.paths") -> Source:
    """Opens a shipped source like :func:`open_source`."""
    shipped = shipped_source(data.source)
    assert shipped is not None and shipped.open is not None, f"{data.source} has no documents"
    source = shipped.open(data, cache, progress, key)
    return source if data.on_bad_sample == "skip" else refuse_bad(source)
