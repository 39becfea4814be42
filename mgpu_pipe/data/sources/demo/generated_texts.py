"""Texts made by rules: random tokens, facts of rules, and numbers in digits and words.

``data=synthetic``                  random tokens in documents of log-normal length
``data=rule_chat``, ``rule_facts``  facts as conversations, held out by operands and wordings; or as plain sentences and
                                    open questions
``data=number_words``               pairs of numbers in digits and in words, both ways
``data=spoken_*``                   numbers read out digit by digit in a sentence, or in words only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig, ModelConfig, NumbersConfig
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.errors import ConfigError, ConfigErrors


def pair_documents(name: str, shape: NumbersConfig) -> Iterator[Document]:
    from mgpu_pipe.data.text.generated import number_pairs  # imports numpy, which check does not load

    for digits, source, target in number_pairs(shape):
        yield Document(source, f"data.source={name}: {digits}", 1, target, digits)


def spoken_documents(name: str, shape: NumbersConfig) -> Iterator[Document]:
    from mgpu_pipe.data.text import generated  # imports numpy, which check does not load

    return generated.spoken_documents(name, shape)


def open_numbers(
    name: str,
    kind: DocumentKind,
    each: int,
    documents_of: Callable[[str, NumbersConfig], Iterator[Document]],
    data: DataConfig,
    cache: Path,
    progress: Progress,
    key: str,
) -> Source:
    """Opens the documents of ``kind``, ``each`` of every number; from ``data`` on as ``DataSource.open``."""
    shape = data.numbers
    return Source(name, digest_of(name, asdict(shape)), each * shape.count, lambda: documents_of(name, shape), kind)


def numbers_source(name: str, kind: DocumentKind, samples: str, each: int) -> DataSource:
    is_pair = kind == "pairs"
    return DataSource(
        name=name,
        samples=samples,
        documents=kind,
        reads=(*TEXT_KEYS, "numbers", "target_len" if is_pair else "messages_column"),
        open=partial(open_numbers, name, kind, each, pair_documents if is_pair else spoken_documents),
    )


NUMBERS = (
    numbers_source("number_words", "pairs", "pairs", 2),
    numbers_source("spoken_chat", "chat", "packed_text", 2),
    numbers_source("spoken_preferences", "preferences", "preferences", 1),
    numbers_source("spoken_unpaired", "unpaired", "unpaired", 2),
)


def open_rules(name: str, kind: DocumentKind, data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    from mgpu_pipe.data.text import rules  # imports numpy, which check does not load

    return Source(name, rules.IDENTITY[name], 0, lambda: rules.rule_documents(name), kind)


RULES = (
    DataSource(
        name="rule_chat",
        documents="chat",
        reads=(*TEXT_KEYS, "messages_column"),
        open=partial(open_rules, "rule_chat", "chat"),
    ),
    DataSource(name="rule_facts", open=partial(open_rules, "rule_facts", "text")),
)


def check_shape(model: ModelConfig, data: DataConfig) -> None:
    shape = data.synthetic
    least_values = (
        ("num_documents", shape.num_documents, 1),
        ("mean_length", shape.mean_length, 2),
        ("sigma", shape.sigma, 0),
    )
    errors = [
        ConfigError(f"data.synthetic.{name}", value, f"use at least {least}")
        for name, value, least in least_values
        if value < least
    ]
    if errors:
        raise ConfigErrors(errors)


SOURCES = (
    DataSource(name="synthetic", documents="tokens", reads=(*TEXT_KEYS, "synthetic"), check=check_shape),
    *RULES,
    *NUMBERS,
)
