"""``data=number_words``: numbers in digits and in English words, both ways, made by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Document, Source


def open_numbers(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    shape = data.numbers

    def documents() -> Iterator[Document]:
        from mgpu_pipe.data.text.numbers import number_pairs  # imports numpy, which check does not load

        for digits, source, target in number_pairs(shape):
            yield Document(source, f"data.source={SOURCE.name}: {digits}", 1, target, digits)

    return Source(SOURCE.name, digest_of(SOURCE.name, asdict(shape)), 2 * shape.count, documents, "pairs")


SOURCE = DataSource(
    name="number_words",
    samples="pairs",
    documents="pairs",
    reads=(*TEXT_KEYS, "numbers", "target_len"),
    open=open_numbers,
)
