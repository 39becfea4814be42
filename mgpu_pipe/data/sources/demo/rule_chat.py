"""``data=rule_chat``: conversations made by rules, held out by operands and by wordings."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Source


def open_rules(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    from mgpu_pipe.data.text import rules  # imports numpy, which check does not load

    return Source(SOURCE.name, rules.IDENTITY[SOURCE.name], 0, lambda: rules.rule_documents(SOURCE.name), "chat")


SOURCE = DataSource(name="rule_chat", documents="chat", reads=(*TEXT_KEYS, "messages_column"), open=open_rules)
