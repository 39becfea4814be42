"""Checks the overrides of the command line before Hydra, and rewrites them for Hydra.

Hydra silently accepts a misspelt key after ``+``, and stops at the first wrong option. This module looks up every key
in the schema and every group choice among the options, those of ``hydra.searchpath`` included, and reports all errors
together. Hydra's parser reads the overrides, so the grammar is Hydra's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException

from mgpu_pipe.config.convert import all_keys, key_kind, unknown_key
from mgpu_pipe.config.hydra.typing_slips import typing_slip
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.config.sections import all_hints, hints
from mgpu_pipe.config.suggest import choose_from, known_elsewhere, path_advice, value_elsewhere
from mgpu_pipe.errors import BadInputError, ConfigError

USED = ("mode", "searchpath")
USED_BY_SWEEPS = ("sweep", "sweeper", "launcher", "callbacks")

LOGS = "leave it out: progress goes to stderr, and each rank's log is logs/rank-*.log of the run's folder"
INSTEAD = {
    "run": "use run.dir=<folder> for this run's folder, or run.root=<folder> for the folder of all runs",
    "output_subdir": "leave it out: a run's folder holds its config.yaml and overrides.txt",
    "job.name": "use run.name=<name>",
    "job.chdir": "leave it out: paths are relative to the folder that the program was started in",
    "job.env_set": "set the variables before the command: NAME=value mgpu-pipe ...",
    "job_logging": LOGS,
    "hydra_logging": LOGS,
    "verbose": LOGS,
    "help": "leave it out; see mgpu-pipe --help",
}


def hydra_key_error(override: Override, multirun: bool) -> ConfigError | None:
    """Error for an override below ``hydra`` that nothing would read; None if it is used."""
    written = override.key_or_group
    key = written.replace("/", ".").removeprefix("hydra").lstrip(".")
    first = key.partition(".")[0]
    if first in USED or (first in USED_BY_SWEEPS and multirun):
        return None
    typed = f"~{written}" if override.is_delete() else written
    value = (override.input_line or "").partition("=")[2]
    if first in USED_BY_SWEEPS:
        return ConfigError(typed, value, "add -m, or leave it out", "only a sweep reads it")
    fix = next((fix for prefix, fix in INSTEAD.items() if f"{key}.".startswith(f"{prefix}.")), "leave it out")
    return ConfigError(typed, value, fix, "nothing here reads this key of Hydra's")


GroupLookup = Callable[[str], tuple[list[str], list[str]]]
"""Returns the options and sub-groups of a group name; the empty name is the root."""

WHOLE = re.compile(r"[^=]+=[^=]")
CLOSES = {"[": "]", "{": "}", "(": ")"}
QUOTES = ("'", '"')


def torn_override(words: Sequence[str], known: Callable[[str], bool]) -> BadInputError | None:
    """Error of the first override written as several words, or with a colon instead of ``=``.

    Args:
        known: whether a word is a group or a key: ``trainer.devices 2`` is an override, ``nosuch 2`` is not. Called
            only for words that are no ``KEY=VALUE``, because it reads the keys of all objectives.
    """
    for index, word in enumerate(words):
        if WHOLE.match(word):
            continue
        rest = words[index + 1] if index + 1 < len(words) else ""
        key = word.rstrip(":=").lstrip("+")
        if not word.strip("+~ "):
            return BadInputError(f"'{word}': is not an override; leave it out, or write KEY=VALUE")
        if word == "=":
            key, value = (words[index - 1] if index else "KEY"), rest or "VALUE"
        elif word != key and not rest and known(key):
            continue  # no value: reported when values are read
        elif rest and (rest.startswith("=") or _is_value(rest)) and known(key):
            value = rest.lstrip("=") or (words[index + 2] if index + 2 < len(words) else "VALUE")
        elif "=" not in word and (colon := word.partition(":"))[1] and known(colon[0].lstrip("+")):
            key, value = colon[0], colon[2]
        else:
            continue
        said = word if ":" in word.rstrip(":") else f"{word} {rest}".strip()
        reason = "an override has no spaces and no colon"
        return BadInputError(f"{said}: {reason}; write {key}={value}")
    return None


def _is_value(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "~", "+"))


def value_slip(key: str, value: str) -> tuple[str, str] | None:
    """Fix and reason for a second ``=``, several overrides, a last comma, an open bracket or quote; else None."""
    if value.startswith("="):
        return f"write {key}={value.lstrip('=')}", "there are several ="
    if value.endswith(","):
        return f"write {key}={value.rstrip(',')}", "overrides have spaces between them, and no commas"
    if value.startswith("(") and value.endswith(")"):
        return f"write {key}=[{value[1:-1]}]", "a list has square brackets"
    first, space, more = value.partition(" ")
    if space and "=" in more.split(" ")[0] and not set("[{('\"") & set(first):
        return f"write {key}={first} {more.strip()} without quotes round both", "several overrides are one word"
    for opening, closing in CLOSES.items():
        missing = value.count(opening) - value.count(closing)
        if missing:
            mark, other = (closing, opening) if missing > 0 else (opening, closing)
            return f"add the missing {mark}, or quote the value", f"there is a {other} without its {mark}"
    for quote in QUOTES:
        if value.count(quote) % 2:
            return f"add the missing {quote}", f"there is one {quote} alone"
    return None


def option_advice(word: str, groups: Sequence[str], lookup: GroupLookup) -> str | None:
    """Advice for ``word`` if it is an option of a group, else None."""
    name = word.rstrip(",")
    holders = [group for group in groups if name in lookup(group)[0]]
    if not holders:
        return None
    return f"is an option of {' and '.join(holders)}; write {' or '.join(f'{group}={name}' for group in holders)}"


MOST_VALUES = 100_000
"""Values of a range in a sweep: each is a run, and all are listed before the first."""
FREE_GROUPS = ("experiment",)
"""Groups of the primary defaults list that are not sections of the schema."""


def check_overrides(
    arguments: list[str], lookup: GroupLookup, multirun: bool = False
) -> tuple[list[str], list[BadInputError]]:
    """Split overrides into those for Hydra and the errors of the others.

    Args:
        arguments: overrides as typed.
        lookup: returns the options and sub-groups of a configuration group.
        multirun: whether a value may be a sweep.

    Returns:
        The good overrides in order, with ``+`` removed or ``++`` added as Hydra requires, and an error for each of
        the others.
    """
    groups = [group for group in lookup("")[1] if group != "hydra"]
    if torn := torn_override(arguments, lambda word: word in groups or word in all_keys()):
        return [], [torn]
    parser = OverridesParser.create()
    good: list[str] = []
    errors: list[BadInputError] = []
    for argument in (leaf for typed in arguments for leaf in _leaves(parser, typed)):
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            errors.append(_unreadable(argument, error, groups, lookup))
            continue
        if override.is_hydra_override() or override.key_or_group == "hydra":
            unused = hydra_key_error(override, multirun)
            errors.extend([unused] if unused else [])
            good.extend([] if unused else [argument])
        elif fault := _sweep_fault(override, multirun):
            errors.append(ConfigError(override.key_or_group, _value_text(override), *fault))
        elif override.key_or_group in groups or "/" in override.key_or_group:
            wrong = _check_choice(override, groups, lookup)
            errors.extend(wrong)
            if not wrong and not _chooses_nothing(override):
                good.append(_as_group_choice(override, argument))
        else:
            kind = key_kind(override.key_or_group)
            if kind == "unknown":
                errors.append(_unknown(override, groups))
            elif kind != "free" and override.is_delete():
                errors.append(_undeletable(override))
            else:
                good.append(_as_key(override, argument, kind))
    return good, errors


def _leaves(parser: OverridesParser, argument: str) -> Iterator[str]:
    """Overrides of each key of a mapping such as ``trainer={max_steps: 3}``; any other override unchanged."""
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


def _sweep_fault(override: Override, multirun: bool) -> tuple[str, str] | None:
    """Fix and reason for several values without ``-m``, and for a range without a step or of too many values."""
    value = override.value()
    if override.is_sweep_override() and not multirun:
        return "add -m for one run each, or write a list as [a,b] and a text as '\"a,b\"'", "several values"
    if isinstance(value, RangeSweep) and value.step == 0:
        return "use a step above or below 0", "the range has a step of 0"
    if _length_of_range(override) > MOST_VALUES:
        return f"use at most {MOST_VALUES:,}", "the range has too many values"
    return None


def _length_of_range(override: Override) -> int:
    """Number of values of ``range(...)``, above :data:`MOST_VALUES` without an end; 0 for other overrides."""
    value = override.value()
    if not isinstance(value, RangeSweep) or value.start is None or value.stop is None or not value.step:
        return 0
    try:
        number = (value.stop - value.start) / value.step
    except OverflowError:  # integers that no float holds
        return MOST_VALUES + 1
    return max(0, int(number)) if math.isfinite(number) else MOST_VALUES + 1


def _is_section(key: str) -> bool:
    hint: Any = RunConfig
    for word in key.split("."):
        if not dataclasses.is_dataclass(hint) or word not in all_hints(hint):  # type: ignore[arg-type]
            return False
        hint = all_hints(hint)[word]  # type: ignore[arg-type]
    return dataclasses.is_dataclass(hint)


def _unreadable(argument: str, error: HydraException, groups: list[str], lookup: GroupLookup) -> BadInputError:
    if "=" not in argument and (meant := path_advice(argument)):
        return BadInputError(f"{argument}: {meant}")
    if slip := typing_slip(argument):
        return slip
    if "=" not in argument:
        if meant := option_advice(argument, groups, lookup):
            return BadInputError(f"{argument}: {meant}")
        return ConfigError(argument, "", f"write {argument}=<value>", "an override needs a value")
    key, _, value = argument.partition("=")
    if malformed := value_slip(key, value):
        return ConfigError(key, value, *malformed)
    reason = str(error).strip().splitlines()[0].partition(" expecting {")[0].removesuffix(".")
    return ConfigError(key, value, f"quote the value: '{key}=\"...\"'", f"cannot be read ({reason})")


def _choices(override: Override) -> Iterator[str]:
    """Options that an override names, all of a sweep; none if Hydra must compute them."""
    value = override.value()
    choices = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    for choice in choices:
        text = getattr(choice, "text", choice)
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
    is_section = dataclasses.is_dataclass(hints(RunConfig).get(group))
    if override.package and is_section:
        fix, reason = f"write {group}={_value_text(override)}", "a group has one place here, without @"
        return [ConfigError(f"{group}@{override.package}", _value_text(override), fix, reason)]
    if override.is_delete() and is_section:
        options, _ = lookup(group)
        reason = "a run has one of these"
        return [ConfigError(f"~{group}", _value_text(override), f"choose another, {group}={'|'.join(options)}", reason)]
    if override.is_delete() or _chooses_nothing(override):
        return []
    options, _ = lookup(group)
    chosen = override.value()
    if isinstance(chosen, list) and len(chosen) > 1 and is_section:
        names = [str(name) for name in chosen]
        fix = f"choose one, {group}={names[0]}, or run each with -m {group}={','.join(names)}"
        return [ConfigError(group, _value_text(override), fix, "a run has one of these")]
    if not options and (key := group.replace("/", ".")) in all_keys():
        fix = f"write {key}={_value_text(override)}"
        return [ConfigError(group, _value_text(override), fix, "a key has dots, and no slashes")]
    return [
        ConfigError(group, choice, value_elsewhere(group, choice) or choose_from(choice, options), "no such option")
        for choice in _choices(override)
        if choice.removesuffix(".yaml") not in options
    ]


def _chooses_nothing(override: Override) -> bool:
    """Whether the override is ``experiment=null``, the default, which Hydra accepts only in a defaults list."""
    return override.key_or_group in FREE_GROUPS and override.value() is None


def _as_group_choice(override: Override, argument: str) -> str:
    in_defaults = override.key_or_group in hints(RunConfig) or override.key_or_group in FREE_GROUPS
    if override.value() is None and override.type is not OverrideType.DEL:
        argument = f"{override.get_key_element()}=none"  # Hydra accepts no null here; the option none is equivalent
    return argument.lstrip("+") if in_defaults and override.type is not OverrideType.DEL else argument


def _as_key(override: Override, argument: str, kind: str) -> str:
    if override.type is OverrideType.DEL:
        return argument
    bare = argument.lstrip("+")
    return f"++{bare}" if kind != "schema" or argument.startswith("++") else bare


def _undeletable(override: Override) -> ConfigError:
    """Error for deleting a key: every key of the schema exists, at least with its default."""
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
    """Error for an unknown key; a single word near a group's name suggests that group."""
    key = override.key_or_group
    if "." not in key and known_elsewhere(key) is None:
        close = choose_from(key, groups)
        if close.startswith("did you mean") and isinstance(override.value(), str):
            return ConfigError(key, _value_text(override), close.split(" (")[0], "no such key or group")
    return unknown_key(key, _value_text(override))


def _value_text(override: Override) -> str:
    line = override.input_line or ""
    return line.partition("=")[2]
