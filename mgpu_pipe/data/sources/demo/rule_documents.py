"""Facts of rules: as conversations, held out by operands and wordings, or as plain sentences and open questions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Source


def open_rules(name: str, kind: DocumentKind, data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    from mgpu_pipe.data.text import rules  # imports numpy, which check does not load

    return Source(name, rules.IDENTITY[name], 0, lambda: rules.rule_documents(name), kind)


SOURCES = (
    DataSource(
        name="rule_chat",
        documents="chat",
        reads=(*TEXT_KEYS, "messages_column"),
        open=partial(open_rules, "rule_chat", "chat"),
    ),
    DataSource(name="rule_facts", open=partial(open_rules, "rule_facts", "text")),
)
