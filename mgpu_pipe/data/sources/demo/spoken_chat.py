"""``data=spoken_chat``: numbers read out digit by digit, each in a sentence and by its words alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Document, Source


def open_numbers(
    name: str, kind: DocumentKind, each: int, data: DataConfig, cache: Path, progress: Progress, key: str
) -> Source:
    """Opens the numbers as documents of ``kind``, ``each`` of every number; the others are arguments of
    ``DataSource.open``."""
    shape = data.numbers

    def documents() -> Iterator[Document]:
        from mgpu_pipe.data.text.numbers import spoken_documents  # imports numpy, which check does not load

        return spoken_documents(name, shape)

    return Source(name, digest_of(name, asdict(shape)), each * shape.count, documents, kind)


SOURCE = DataSource(
    name="spoken_chat",
    documents="chat",
    reads=(*TEXT_KEYS, "messages_column", "numbers"),
    open=partial(open_numbers, "spoken_chat", "chat", 2),
)
