"""The documentation of every key, read from the string literals below the schema's fields."""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import is_dataclass
from pathlib import Path

from mgpu_pipe.config import schema
from mgpu_pipe.config.sections import SECTIONS, hints


@functools.lru_cache(maxsize=None)
def field_documentation() -> dict[tuple[str, str], str]:
    """``(class name, field name)`` to the one line of documentation below that field."""
    sections = [hint for hint in hints(schema.RunConfig).values() if isinstance(hint, type) and is_dataclass(hint)]
    classes: list[type] = [
        schema.RunConfig,
        *sections,
        *(keys for section in SECTIONS.values() for keys in section.all_keys().values()),
    ]
    files = dict.fromkeys(map(inspect.getfile, classes))
    nodes = [node for file in files for node in ast.parse(Path(file).read_text(encoding="utf-8")).body]
    texts: dict[tuple[str, str], str] = {}
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                texts[node.name, field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return texts


def class_documentation(cls: type) -> str:
    """The docstring of a section, empty where it has none of its own."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())
