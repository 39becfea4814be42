"""The JSON schema (draft 2020-12) of a configuration, for editors and for ``mgpu-pipe schema``."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin

from mgpu_pipe.config.convert import to_plain
from mgpu_pipe.config.docs import class_documentation, field_documentation
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import SECTIONS, hints

INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
LIMITS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """The schema of a run's configuration file; every key carries its documentation and default.

    Any value may also be an interpolation, ``${...}``, as OmegaConf reads it. The defaults list and Hydra's own
    node, which configuration files of the tree also hold, are allowed as they are.
    """
    schema = _section(RunConfig, RunConfig())
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mgpu_pipe run", **schema}


def _section(cls: Any, defaults: Any) -> dict[str, Any]:
    documentation = field_documentation()
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
            entry = _with_interpolation(_of(hint)) | {"default": to_plain(defaults)[field.name]}
            entry |= {LIMITS[name]: bound for name, bound in field.metadata.items() if name in LIMITS}
        text = documentation.get((cls.__name__, field.name))
        properties[field.name] = {"description": text, **entry} if text else entry
    described = {"description": class_documentation(cls)} if class_documentation(cls) else {}
    return {"type": "object", **described, "properties": properties, "additionalProperties": False}


def _of(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(arm) for arm in get_args(hint)]}
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin is list:
        return {"type": "array", "items": _of(get_args(hint)[0])}
    if origin is dict:
        item = get_args(hint)[1]
        return {"type": "object"} | ({"additionalProperties": _of(item)} if dataclasses.is_dataclass(item) else {})
    if dataclasses.is_dataclass(hint):
        return _section(hint, hint())  # type: ignore[operator]
    return {"type": SCALARS[hint]} if hint in SCALARS else {}


def _with_interpolation(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("type") in ("string", "object"):
        return entry
    arms = entry.get("anyOf", [entry])
    return entry if {"type": "string"} in arms else {"anyOf": [*arms, INTERPOLATION]}
