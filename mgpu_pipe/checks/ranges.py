"""Numbers below or above what they can be, by the range that stands beside each key in the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import ge, gt, le, lt
from typing import Any

from mgpu_pipe.errors import ConfigError

LIMITS = {
    "at_least": (ge, "of at least"),
    "above": (gt, "above"),
    "at_most": (le, "of at most"),
    "below": (lt, "below"),
}


def range_errors(config: Any, path: str = "") -> list[ConfigError]:
    """Of every key below ``config``, a dataclass, whose field's metadata names a limit; null and texts have none."""
    return list(_errors(config, path))


def _errors(node: Any, path: str) -> Iterator[ConfigError]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _errors(value, f"{path}.{name}")
    if not is_dataclass(node):
        return
    for field in fields(node):
        value, key = getattr(node, field.name), f"{path}.{field.name}" if path else field.name
        yield from _errors(value, key)
        for limit, bound in field.metadata.items():
            if limit in LIMITS and isinstance(value, int | float) and not isinstance(value, bool):
                within, words = LIMITS[limit]
                if not within(value, bound):
                    yield ConfigError(key, value, f"use a number {words} {bound}{field.metadata.get('or', '')}")
