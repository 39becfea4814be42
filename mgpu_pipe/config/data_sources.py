"""Declarations of the shipped data sources, found by listing the folder ``data/sources``.

Each module there has a ``SOURCE``: a :class:`mgpu_pipe.data.data_source.DataSource` under the module's name. Its
declaration is the part that the configuration and the checks ask. Installed packages register further sources
(:mod:`mgpu_pipe.config.plugins`); those have no declaration.
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
        name: ``data.source``, and the name of its module and of its option of ``conf/data``.
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
def _packages() -> dict[str, str]:
    """Package of each source's module by the source's name, in alphabetical order; demonstrations are last."""
    root = Path(__file__).parents[2]
    return {
        path.stem: package
        for package in PACKAGES
        for path in sorted(root.joinpath(*package.split(".")).glob("*.py"))
        if path.stem.isidentifier() and path.stem != "__init__"
    }


def source_names() -> tuple[str, ...]:
    """Names of the shipped sources. Imports none of them."""
    return tuple(_packages())


@functools.lru_cache(maxsize=None)
def find_source(name: str) -> SourceDeclaration | None:
    """Imports a shipped source; None for any other name, such as a plug-in's."""
    if name not in _packages():
        return None
    source: SourceDeclaration = import_module(f"{_packages()[name]}.{name}").SOURCE
    return source


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


def unread_keys(source: SourceDeclaration) -> set[str]:
    """Keys of ``DataConfig`` that other sources read and this one does not."""
    return {key for other in all_sources() for key in other.reads} - set(source.reads)
