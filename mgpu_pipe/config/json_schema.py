"""The JSON schema (draft 2020-12) of a configuration, for editors and for ``mgpu-pipe schema``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mgpu_pipe.config import schema
from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import SECTIONS, hints


@functools.lru_cache(maxsize=None)
def field_documentation() -> dict[tuple[str, str], str]:
    """Documentation below each field, by ``(class name, field name)``."""
    sections = [hint for hint in hints(schema.RunConfig).values() if isinstance(hint, type) and is_dataclass(hint)]
    classes: list[type] = [
        schema.RunConfig,
        *sections,
        *(keys for section in SECTIONS.values() for keys in section.all_keys().values()),
    ]
    owners = [base for cls in classes for base in cls.__mro__ if is_dataclass(base)]
    files = dict.fromkeys(map(inspect.getfile, owners))
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


def key_documentation(cls: type, name: str) -> str:
    """Documentation of a field of a section, its own or a base class's; empty without one."""
    texts = field_documentation()
    return next((texts[base.__name__, name] for base in cls.__mro__ if (base.__name__, name) in texts), "")


def class_documentation(cls: type) -> str:
    """Docstring of a section; empty without one."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else " ".join(text.split())


INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
LIMITS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """JSON schema of a run's file, with documentation and default of every key; any value may be ``${...}``."""
    schema = _section(RunConfig, RunConfig())
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mgpu_pipe run", **schema}


def _section(cls: Any, defaults: Any) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint, default = hints(cls)[field.name], getattr(defaults, field.name)
        if hint in SECTIONS:
            entry = _section(hint, hint())
            for keys in SECTIONS[hint].all_keys().values():
                entry["properties"] = {**_section(keys, keys())["properties"], **entry["properties"]}
        elif dataclasses.is_dataclass(hint):
            entry = _section(hint, default)
        else:
            entry = _with_interpolation(_type_schema(hint)) | {"default": to_plain(defaults)[field.name]}
            entry |= {LIMITS[name]: bound for name, bound in field.metadata.items() if name in LIMITS}
        text = key_documentation(cls, field.name)
        properties[field.name] = {"description": text, **entry} if text else entry
    described = {"description": class_documentation(cls)} if class_documentation(cls) else {}
    return {"type": "object", **described, "properties": properties, "additionalProperties": False}


def _type_schema(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(arm) for arm in get_args(hint)]}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin is list:
        return {"type": "array", "items": _type_schema(get_args(hint)[0])}
    if origin is dict:
        item = get_args(hint)[1]
        return {"type": "object"} | (
            {"additionalProperties": _type_schema(item)} if dataclasses.is_dataclass(item) else {}
        )
    if dataclasses.is_dataclass(hint):
        return _section(hint, hint())  # type: ignore[operator]
    return {"type": SCALARS[hint]} if hint in SCALARS else {}


def _with_interpolation(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("type") in ("string", "object"):
        return entry
    arms = entry.get("anyOf", [entry])
    return entry if {"type": "string"} in arms else {"anyOf": [*arms, INTERPOLATION]}
