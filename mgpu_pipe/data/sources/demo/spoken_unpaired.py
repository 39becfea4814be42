"""``data=spoken_unpaired``: the numbers of ``spoken_chat``, of whose answers the sentence is desirable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.kinds import prepare_unpaired
from mgpu_pipe.data.source import DataSource
from mgpu_pipe.data.text.documents import Document, Source


def open_numbers(config: RunConfig, cache: Path, progress: Progress, key: str) -> Source:
    shape = config.data.numbers

    def documents() -> Iterator[Document]:
        from mgpu_pipe.data.text.numbers import spoken_documents  # imports numpy, which check does not load

        return spoken_documents(SOURCE.name, shape)

    return Source(SOURCE.name, digest_of(SOURCE.name, asdict(shape)), 2 * shape.count, documents, "unpaired")


SOURCE = DataSource(
    name="spoken_unpaired",
    samples="unpaired",
    documents="unpaired",
    reads=(*TEXT_KEYS, "messages_column", "numbers"),
    prepare=prepare_unpaired,
    open=open_numbers,
)
