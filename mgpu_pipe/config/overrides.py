"""Checks the overrides of the command line before Hydra sees them, and makes them ones that Hydra accepts.

Hydra takes a misspelt key after ``+`` in silence, and stops at the first wrong option. Here every override's key
is looked up in the schema and every group choice among the options there are (those of ``hydra.searchpath`` too),
and all errors are reported together. Hydra's own parser reads the overrides, so that the grammar is Hydra's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, cast, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import HydraException

from mgpu_pipe.config.convert import unknown_key
from mgpu_pipe.config.hydra_keys import hydra_key_error
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import all_hints, hints
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.config.synonyms import known_elsewhere, path_meant, value_elsewhere
from mgpu_pipe.errors import BadInputError, ConfigError

FREE_GROUPS = ("experiment",)
"""Groups of the primary defaults list that are no section of the schema."""

GroupLookup = Callable[[str], tuple[list[str], list[str]]]
"""Given a group's name: its options and its sub-groups; the empty name is the root."""


def check_overrides(
    arguments: list[str], lookup: GroupLookup, multirun: bool = False
) -> tuple[list[str], list[BadInputError]]:
    """Split overrides into those that Hydra can take and the errors of the others.

    Args:
        arguments: overrides as typed.
        lookup: tells the options and sub-groups of a configuration group.
        multirun: whether a value may be a sweep.

    Returns:
        The good overrides, in order, with ``+`` dropped from or ``++`` put before keys where Hydra wants it so;
        and one error for each of the others.
    """
    if "=" in arguments:
        return [], [BadInputError("=: stands alone; write KEY=VALUE as one word, without spaces round the =")]
    parser = OverridesParser.create()
    groups = _groups(lookup)
    good: list[str] = []
    errors: list[BadInputError] = []
    for argument in (leaf for given in arguments for leaf in _leaves(parser, given)):
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            errors.append(_unreadable(argument, error))
            continue
        if override.is_hydra_override() or override.key_or_group == "hydra":
            unused = hydra_key_error(override, multirun)
            errors.extend([unused] if unused else [])
            good.extend([] if unused else [argument])
        elif override.is_sweep_override() and not multirun:
            fix = "add -m for one run each, or write a list as [a,b] and a text as '\"a,b\"'"
            errors.append(ConfigError(override.key_or_group, _value_text(override), fix, "several values"))
        elif override.key_or_group in groups or "/" in override.key_or_group:
            wrong = _check_choice(override, groups, lookup)
            errors.extend(wrong)
            if not wrong and not _chooses_nothing(override):
                good.append(_as_group_choice(override, argument))
        else:
            kind = _key_kind(override.key_or_group)
            if kind == "unknown":
                errors.append(_unknown(override, groups))
            elif kind != "free" and override.is_delete():
                errors.append(_undeletable(override))
            else:
                good.append(_as_key(override, argument, kind))
    return good, errors


def _leaves(parser: OverridesParser, argument: str) -> Iterator[str]:
    """A section that is given as a mapping, ``trainer={max_steps: 3}``, as one override for each of its keys."""
    try:
        override = parser.parse_override(argument)
    except HydraException:
        yield argument
        return
    key = override.key_or_group
    if not isinstance(override.value(), dict) or override.is_sweep_override() or not _is_section(key):
        yield argument
        return
    for name, value in override.value().items():  # type: ignore[union-attr]
        text = dataclasses.replace(override, _value=value).get_value_element_as_str()
        yield from _leaves(parser, f"{key}.{name}={text}")


def _is_section(key: str) -> bool:
    hint: Any = RunConfig
    for word in key.split("."):
        if not dataclasses.is_dataclass(hint) or word not in all_hints(hint):  # type: ignore[arg-type]
            return False
        hint = all_hints(hint)[word]  # type: ignore[arg-type]
    return dataclasses.is_dataclass(hint)


def _groups(lookup: GroupLookup) -> list[str]:
    return [group for group in lookup("")[1] if group != "hydra"]


def _unreadable(argument: str, error: HydraException) -> BadInputError:
    if "=" not in argument:
        if meant := path_meant(argument):
            return BadInputError(f"{argument}: {meant}")
        return ConfigError(argument, "", f"write {argument}=<value>", "an override needs a value")
    key, _, value = argument.partition("=")
    reason = str(error).strip().splitlines()[0].partition(" expecting {")[0].removesuffix(".")
    return ConfigError(key, value, f"quote the value: '{key}=\"...\"'", f"cannot be read ({reason})")


def _choices(override: Override) -> Iterator[str]:
    """The options an override names, of a sweep all; nothing where Hydra has to work them out."""
    value = override.value()
    named = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    for one in named:
        text = getattr(one, "text", one)
        if isinstance(text, list):
            yield from (str(getattr(item, "text", item)) for item in text)
        elif isinstance(text, str) and "${" not in text:
            yield text
        elif text is None or isinstance(text, bool | int | float):
            yield "none" if text is None else str(text)


def _check_choice(override: Override, groups: list[str], lookup: GroupLookup) -> list[BadInputError]:
    group = override.key_or_group.strip("/")
    if "/" in group and group.split("/")[0] not in groups:
        return [ConfigError(group, _value_text(override), choose_from(group, groups), "no such group")]
    if override.is_delete() and dataclasses.is_dataclass(hints(RunConfig).get(group)):
        options, _ = lookup(group)
        reason = "a run has one of these"
        return [ConfigError(f"~{group}", _value_text(override), f"choose another, {group}={'|'.join(options)}", reason)]
    if override.is_delete() or _chooses_nothing(override):
        return []
    options, _ = lookup(group)
    return [
        ConfigError(group, choice, value_elsewhere(group, choice) or choose_from(choice, options), "no such option")
        for choice in _choices(override)
        if choice.removesuffix(".yaml") not in options
    ]


def _chooses_nothing(override: Override) -> bool:
    """``experiment=null``, which is the default, and which Hydra takes in a defaults list only."""
    return override.key_or_group in FREE_GROUPS and override.value() is None


def _as_group_choice(override: Override, argument: str) -> str:
    in_defaults = override.key_or_group in hints(RunConfig) or override.key_or_group in FREE_GROUPS
    if override.value() is None and override.type is not OverrideType.DEL:
        argument = f"{override.get_key_element()}=none"  # Hydra takes no null here; the option none says the same
    return argument.lstrip("+") if in_defaults and override.type is not OverrideType.DEL else argument


def _key_kind(key: str) -> str:
    """``schema`` for a key of the schema, ``own`` for a plug-in's or an objective's own, ``mapping`` for one that holds
    a free-form mapping, ``free`` for one below it, else ``unknown``.
    """
    own, hint = False, cast(Any, RunConfig)
    for word in key.split("."):
        if get_origin(hint) is dict:
            return "free"
        if not dataclasses.is_dataclass(hint) or word not in all_hints(hint):  # type: ignore[arg-type]
            return "unknown"
        own, hint = own or word not in hints(hint), all_hints(hint)[word]  # type: ignore[arg-type]
    if get_origin(hint) is dict:
        return "mapping"
    return "own" if own else "schema"


def _as_key(override: Override, argument: str, kind: str) -> str:
    if override.type is OverrideType.DEL:
        return argument
    bare = argument.lstrip("+")
    return f"++{bare}" if kind != "schema" or argument.startswith("++") else bare


def _undeletable(override: Override) -> ConfigError:
    """A key of the schema is always there: without a value it has its default."""
    key = override.key_or_group
    value: Any = RunConfig()
    for word in key.split("."):
        if not hasattr(value, word):
            return ConfigError(f"~{key}", "", f"leave it out, or set {key}=<value>", "a key cannot be deleted")
        value = getattr(value, word)
    if dataclasses.is_dataclass(value):
        first = dataclasses.fields(value)[0].name
        return ConfigError(f"~{key}", "", f"set its keys, {key}.{first}=...", "a section cannot be deleted")
    reason = f"a key cannot be deleted; its default is {'null' if value is None else json.dumps(value)}"
    return ConfigError(f"~{key}", "", f"leave it out, or set {key}=<value>", reason)


def _unknown(override: Override, groups: list[str]) -> ConfigError:
    """No such key; if it is one word that is like a group's name, that is meant."""
    key = override.key_or_group
    if "." not in key and known_elsewhere(key) is None:
        close = choose_from(key, groups)
        if close.startswith("did you mean") and isinstance(override.value(), str):
            return ConfigError(key, _value_text(override), close.split(" (")[0], "no such key or group")
    return unknown_key(key, _value_text(override))


def _value_text(override: Override) -> str:
    line = override.input_line or ""
    return line.partition("=")[2]
