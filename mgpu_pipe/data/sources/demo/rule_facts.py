"""``data=rule_facts``: the facts of ``rule_chat`` as plain sentences, and its questions without answers."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.text.documents import Source


def open_rules(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    from mgpu_pipe.data.text import rules  # imports numpy, which check does not load

    return Source(SOURCE.name, rules.IDENTITY[SOURCE.name], 0, lambda: rules.rule_documents(SOURCE.name))


SOURCE = DataSource(name="rule_facts", open=open_rules)
