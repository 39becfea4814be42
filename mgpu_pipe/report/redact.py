"""Keeps a secret that a user wrote out, under a key such as ``api_key``, from the report.

The right way is an interpolation, ``${oc.env:WANDB_API_KEY}``; that names no secret and stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

SECRET_KEY = re.compile(r"(^|[._-])(api_?key|secret|passw(or)?d|(auth|access|hf)_token|credentials?)$", re.IGNORECASE)
HIDDEN = "(hidden)"


def tree(values: Any, key: str = "") -> Any:
    """A copy of nested mappings and lists in which secrets are hidden; list items may be overrides of a command."""
    if isinstance(values, dict):
        return {name: tree(value, str(name)) for name, value in values.items()}
    if isinstance(values, list):
        return [override(value) if isinstance(value, str) else tree(value, key) for value in values]
    return HIDDEN if SECRET_KEY.search(key) and _is_written_out(values) else values


def override(text: str) -> str:
    """``key=value``, its value hidden if the key names a secret; any other text as it is."""
    key, separator, value = text.partition("=")
    return f"{key}={HIDDEN}" if separator and SECRET_KEY.search(key) and _is_written_out(value) else text


def line(text: str) -> str:
    """A line of a log, in which a command or a configuration may be told."""
    return re.sub(r"[^\s=:]+[=:]\s*\S+", _hidden, text)


def _hidden(found: re.Match[str]) -> str:
    key, separator, value = re.split(r"([=:]\s*)", found[0], maxsplit=1)
    return f"{key}{separator}{HIDDEN}" if SECRET_KEY.search(key.strip("'\"")) and _is_written_out(value) else found[0]


def _is_written_out(value: object) -> bool:
    return value not in (None, "", "null") and not str(value).strip("'\"").startswith("${")
