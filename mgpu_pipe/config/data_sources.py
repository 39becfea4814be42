"""Declarations of the shipped data sources, found by listing the folder ``data/sources``.

Each module there has a ``SOURCE``, a :class:`mgpu_pipe.data.data_source.DataSource` under the module's name. A module
of several variants has ``SOURCES`` instead, and ``VARIANTS`` of its package lists their names. The configuration and
the checks read the declaration. Installed packages register further sources (:mod:`mgpu_pipe.config.plugins`), which
have no declaration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("mgpu_pipe.data.sources", "mgpu_pipe.data.sources.demo")
DocumentKind = Literal["text", "chat", "preferences", "unpaired", "pairs", "text_groups", "tokens"]
TEXT_KEYS = ("tokenizer", "seq_len", "on_too_long")
"""Keys of ``data`` that every source of text reads."""


@dataclass(frozen=True, kw_only=True)
class SourceDeclaration:
    """The part of a shipped source that the configuration knows.

    Attributes:
        name: ``data.source``, and the name of its option of ``conf/data``.
        samples: kind of its samples; an objective trains on one kind.
        documents: kind of its documents; a chat template renders ``chat``, ``preferences`` and ``unpaired``.
        reads: keys of ``DataConfig`` that it reads and some other sources do not.
        keys: dataclass of its further keys, a subclass of ``DataConfig``; None where it has none.
        reads_files: whether it reads the files of ``data.paths``.
    """

    name: str
    samples: str = "packed_text"
    documents: DocumentKind = "text"
    reads: tuple[str, ...] = TEXT_KEYS
    keys: type[Any] | None = None
    reads_files: bool = False

    @property
    def holds_conversations(self) -> bool:
        """Whether a chat template renders its samples."""
        return self.documents in ("chat", "preferences", "unpaired")


@functools.lru_cache(maxsize=None)
def _modules() -> dict[str, str]:
    """Module of each source by the source's name, in alphabetical order; demonstrations are last."""
    root, modules = Path(__file__).parents[2], dict[str, str]()
    for package in PACKAGES:
        variants = import_module(package).VARIANTS
        files = root.joinpath(*package.split(".")).glob("*.py")
        stems = [file.stem for file in files if file.stem.isidentifier() and file.stem != "__init__"]
        modules |= sorted((name, f"{package}.{stem}") for stem in stems for name in variants.get(stem, (stem,)))
    return modules


def source_names() -> tuple[str, ...]:
    """Names of the shipped sources. Imports none of them."""
    return tuple(_modules())


@functools.lru_cache(maxsize=None)
def find_source(name: str) -> SourceDeclaration | None:
    """Imports a shipped source; None for any other name, such as a plug-in's."""
    if name not in _modules():
        return None
    module = import_module(_modules()[name])
    sources: tuple[SourceDeclaration, ...] = getattr(module, "SOURCES", None) or (module.SOURCE,)
    return next(source for source in sources if source.name == name)


def all_sources() -> list[SourceDeclaration]:
    """Imports every shipped source."""
    return [source for source in map(find_source, source_names()) if source is not None]


def file_sources() -> list[str]:
    """Names of the shipped sources that read the files of ``data.paths``."""
    return [source.name for source in all_sources() if source.reads_files]


def samples_of(name: str) -> str:
    """Kind of samples of a shipped source; empty for any other name."""
    source = find_source(name)
    return source.samples if source else ""


def makes_tokens(name: str) -> bool:
    """Whether a shipped source gives token ids, not text."""
    source = find_source(name)
    return source is not None and source.documents == "tokens"


def reads_tokenizer(name: str) -> bool:
    """Whether a tokenizer makes the tokens of a source's samples; that of a plug-in may."""
    source = find_source(name)
    return source is None or ("tokenizer" in source.reads and source.documents != "tokens")


def unread_keys(source: SourceDeclaration) -> set[str]:
    """Keys of ``DataConfig`` that other sources read and this one does not."""
    return {key for other in all_sources() for key in other.reads} - set(source.reads)
