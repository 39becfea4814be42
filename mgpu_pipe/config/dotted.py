"""Nested settings by their dotted path, as overrides name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted path; lists and empty mappings are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(leaves(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def setting(value: object) -> str:
    """A configured value as it is typed."""
    if isinstance(value, list):
        return f"[{', '.join(map(setting, value))}]"
    if isinstance(value, str) and (not value or value != value.strip() or "," in value):
        return repr(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
