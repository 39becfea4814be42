"""Strict conversion of plain values to the dataclass tree, and back.

Only whole numbers are coerced, to float, and texts of the environment, to what their key takes. Every error of the
tree is collected; each names the key's full path, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from mgpu_pipe.config.hydra.interpolation import MISSING, EnvironmentText, hide_environment
from mgpu_pipe.config.plugins import with_present_classes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import SECTIONS, all_hints, hints
from mgpu_pipe.config.suggest import (
    FORMS,
    SECTION_NAMES,
    VALUES,
    choose_from,
    known_elsewhere,
    nearest,
    nearest_key,
    value_elsewhere,
)
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.system.local_files import is_text

_BOOLEANS = {"true": True, "false": False}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted path; lists and empty mappings are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(leaves(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def merge(before: Any, after: Any) -> Any:
    """``after`` over ``before``; mappings are merged at every depth."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {**before, **{key: merge(before.get(key), value) for key, value in after.items()}}


def setting(value: object) -> str:
    """A configured value as a user types it."""
    if isinstance(value, list):
        return f"[{', '.join(map(setting, value))}]"
    if isinstance(value, str) and (not value or value != value.strip() or "," in value):
        return repr(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


T = TypeVar("T")
DEVICES = "trainer.devices"
MAX_UNKNOWN_KEYS = 40
"""Limit of reported unknown keys: searching suggestions for 100,000 keys would take long."""
Errors = list[ConfigError]


class _Refused:
    """Placeholder of a value whose error was recorded."""


REFUSED = _Refused()


def convert(cls: type[T], mapping: Mapping[str, Any]) -> tuple[T, list[BadInputError]]:
    """Convert ``mapping`` to ``cls``; returns it with all errors. Missing and refused keys keep their defaults."""
    errors: Errors = []
    return _dataclass(cls, with_present_classes(mapping), "", errors), list(errors)


def to_plain(config: Any, leaf: Callable[[Any], Any] = hide_environment) -> dict[str, Any]:
    """Nested dictionary safe to write: texts of the environment as interpolations, values through ``leaf``."""
    return {field.name: _plain(getattr(config, field.name), leaf) for field in dataclasses.fields(config)}


def _plain(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value, leaf)
    if isinstance(value, Mapping) and any(dataclasses.is_dataclass(item) for item in value.values()):
        return {name: _plain(item, leaf) for name, item in value.items()}
    return leaf(value)


def schema_keys(cls: type = RunConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below ``cls`` with its type; sections come before their keys."""
    for name, hint in all_hints(cls).items():
        key = _join(path, name)
        yield key, hint
        if dataclasses.is_dataclass(hint):
            yield from schema_keys(hint, key)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=None)
def all_keys() -> tuple[str, ...]:
    return tuple(key for key, _ in schema_keys())


def key_kind(key: str) -> str:
    """``schema`` for a key of the schema, ``own`` for a plug-in's or an objective's own, ``mapping`` for one that holds
    a free-form mapping, ``free`` for one below it, else ``unknown``.
    """
    is_plugin_key, hint = False, cast(Any, RunConfig)
    for word in key.split("."):
        if get_origin(hint) is dict:
            return "free"
        if not dataclasses.is_dataclass(hint) or word not in all_hints(hint):  # type: ignore[arg-type]
            return "unknown"
        is_plugin_key, hint = is_plugin_key or word not in hints(hint), all_hints(hint)[word]  # type: ignore[arg-type]
    if get_origin(hint) is dict:
        return "mapping"
    return "own" if is_plugin_key else "schema"


SEE = "see the keys with: mgpu-pipe schema"


def unknown_key(path: str, value: object) -> ConfigError:
    """Error for a key that is not in the schema."""
    section, _, rest = path.partition(".")
    if rest and section in SECTION_NAMES:
        return ConfigError(
            path, value, f"did you mean {nearest_key(f'{SECTION_NAMES[section]}.{rest}', all_keys())}?", "no such key"
        )
    near = nearest_key(path, all_keys())
    close = near if near == _last(path) else _correct(path)
    elsewhere = None if close and _last(close) == _last(path) else known_elsewhere(path, value)
    close = close or near
    return ConfigError(path, value, elsewhere or (f"did you mean {close}?" if close else SEE), "no such key")


def _misplaced_key(key: str, value: object, owners: list[str]) -> ConfigError:
    return ConfigError(key, _for_message(value), f"leave it out, or choose {' or '.join(owners)}", "no such key here")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _correct(path: str) -> str | None:
    """``path`` with each misspelt word corrected within its section; None if a word has no near match."""
    hint: Any = RunConfig
    words = []
    for word in path.split("."):
        if get_origin(hint) is dict:
            words.append(word)
            item = get_args(hint)[1]
            hint = item if dataclasses.is_dataclass(item) else hint
            continue
        names = all_hints(hint) if dataclasses.is_dataclass(hint) else {}  # type: ignore[arg-type]
        close = word if word in names else nearest(word, names)
        if close is None:
            return None
        words.append(close)
        hint = names[close]
    return ".".join(words)


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _dataclass(cls: Any, mapping: Any, path: str, errors: Errors) -> Any:
    section = SECTIONS.get(cls)
    if section:
        cls = section.keys(section.chosen_by(mapping))
    types_of = hints(cls)
    converted_values: dict[str, Any] = {}
    for name, value in mapping.items():
        key = _join(path, name)
        if name not in types_of:
            if len(errors) < MAX_UNKNOWN_KEYS:
                owners = section.owners(name) if section else []
                errors.append(_misplaced_key(key, value, owners) if owners else unknown_key(key, _for_message(value)))
            continue
        converted = _value(types_of[name], value, key, errors)
        if converted is not REFUSED:
            converted_values[name] = converted
    return cls(**converted_values)


def _value(hint: Any, value: Any, key: str, errors: Errors) -> Any:
    """``value`` converted to ``hint``, or ``REFUSED`` with an error recorded."""
    if isinstance(value, str) and value == MISSING:
        kind = type_name(hint).removesuffix(" or null").removeprefix("a ")
        errors.append(ConfigError(key, value, f"write {key}=<{kind}>", "must be given"))
        return REFUSED
    if isinstance(value, str) and (not is_text(value) or "\0" in value):
        errors.append(ConfigError(key, repr(value), "correct it", "holds a zero byte or half a character"))
        return REFUSED
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _dataclass(hint, value, key, errors)
        return _refuse(hint, value, key, errors)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, value, key, errors)
    if isinstance(value, EnvironmentText):
        value = _from_environment(hint, value)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(hint)):
            return value
        return _refuse(hint, value, key, errors)
    if origin is list:
        return _list(hint, value, key, errors)
    if origin is dict:
        return _mapping(hint, value, key, errors) if isinstance(value, Mapping) else _refuse(hint, value, key, errors)
    if hint is Any:
        return value
    if hint is float and _is_number(value):
        if math.isfinite(value):
            return float(value)
        errors.append(ConfigError(key, value, "use a finite number"))
        return REFUSED
    fits = type(value) is hint or (hint is str and isinstance(value, str)) or (hint is type(None) and value is None)
    return value if fits else _refuse(hint, value, key, errors)


def _from_environment(hint: Any, value: EnvironmentText) -> Any:
    """The number, boolean or choice in a text of the environment, which holds texts alone; else the text unchanged."""
    text = str.__str__(value)
    try:
        if get_origin(hint) is Literal:
            return {str(choice): choice for choice in get_args(hint)}[text]
        return hint(text) if hint in (int, float) else _BOOLEANS[text.lower()] if hint is bool else value
    except (KeyError, ValueError):
        return value


def _union(hint: Any, value: Any, key: str, errors: Errors) -> Any:
    for arm in get_args(hint):
        attempt: Errors = []
        converted = _value(arm, value, key, attempt)
        if not attempt:
            return converted
    return _refuse(hint, value, key, errors)


def _list(hint: Any, value: Any, key: str, errors: Errors) -> Any:
    if not isinstance(value, list | tuple):
        if isinstance(value, str) and value and set(value).isdisjoint("[],"):
            errors.append(ConfigError(key, value, f"write it as a list, '{key}=[\"{value}\"]'"))
            return REFUSED
        return _refuse(hint, value, key, errors)
    (item_hint,) = get_args(hint)
    items = [_value(item_hint, item, f"{key}[{index}]", errors) for index, item in enumerate(value)]
    return REFUSED if any(item is REFUSED for item in items) else items


def _mapping(hint: Any, value: Mapping[Any, Any], key: str, errors: Errors) -> dict[str, Any]:
    """A mapping by the user's names: of sections, or free-form with any plain values and nothing missing."""
    _, item_hint = get_args(hint)
    converted: dict[str, Any] = {}
    for name, item in value.items():
        where = _join(key, name)
        if not isinstance(name, str):
            errors.append(ConfigError(where, _for_message(item), "write the name as text"))
        elif isinstance(item, str) and item == MISSING:
            errors.append(ConfigError(where, item, f"write {where}=<value>", "must be given"))
        else:
            free = item_hint is Any and isinstance(item, Mapping)
            converted[name] = _value(dict[str, Any] if free else item_hint, item, where, errors)
    return {name: item for name, item in converted.items() if item is not REFUSED}


def _refuse(hint: Any, value: Any, key: str, errors: Errors) -> Any:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [str(choice) for arm in arms if get_origin(arm) is Literal for choice in get_args(arm)]
    reason, fix = _diagnosis(arms, value, key)
    if not fix and all(get_origin(arm) is Literal or arm is type(None) for arm in arms):
        fix = choose_from(str(value), [*words, "null"] if type(None) in arms else words)
    elif not fix:
        close = nearest(value, words) if isinstance(value, str) else None
        fix = f"did you mean {close}? (or use {type_name(hint)})" if close else f"use {type_name(hint)}"
    errors.append(ConfigError(key, _for_message(value), fix, reason))
    return REFUSED


def _diagnosis(arms: tuple[Any, ...], value: Any, key: str) -> tuple[str, str]:
    """Reason and fix of common mistakes; empty if the type explains enough."""
    if value is None:
        return "null is not a value of this key", ""
    if meant := VALUES.get(key, {}).get(str(value).lower()):
        return "no such value", f"use {meant}"
    if key == DEVICES and isinstance(value, list):
        numbers = ",".join(map(str, value))
        return "it is a number of devices", f"use {DEVICES}={len(value)}, and CUDA_VISIBLE_DEVICES={numbers} before it"
    is_typed = isinstance(value, str) and not isinstance(value, EnvironmentText)
    if is_typed and (int in arms or float in arms) and _reads_as_number(value):
        return "this is text, not a number", f"leave out the inner quotes: {key}={value}"
    if str in arms and (_is_number(value) or isinstance(value, bool)):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return "this is not text", value_elsewhere(key, text) or FORMS.get(key) or f"quote it twice: {key}=\"'{text}'\""
    if isinstance(value, float) and value.is_integer() and int in arms:
        return "a whole number is wanted", f"write {int(value)}"
    return "", ""


def type_name(hint: Any) -> str:
    """Words for a type, for messages."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(type_name(arm) for arm in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return "a list, [a,b,...]"
    if get_origin(hint) is dict:
        return "a mapping, {name: value}"
    if dataclasses.is_dataclass(hint):
        return f"the section's keys, e.g. {{{dataclasses.fields(hint)[0].name}: ...}}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, str(hint))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _for_message(value: Any) -> Any:
    text = hide_environment(value)
    return f'"{text}"' if isinstance(value, str) and _reads_as_number(value) else text
