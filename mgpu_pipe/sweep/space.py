"""What a sweep searches: a range or a list of values for every key, some of them under a condition."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from mgpu_pipe.config.convert import schema_keys
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.runs.continue_line import hydra_quoted

LEAF = ("low", "high", "log", "values", "when")
"""The entries of a parameter that a configuration file writes as a mapping."""
DIGITS = 6
"""Significant digits of a drawn number: it is written into an override."""


@dataclass(frozen=True)
class Parameter:
    """One key of the space.

    Attributes:
        values: the values to choose among, as overrides write them; empty for a range.
        low, high: ends of a range.
        log: whether the range is drawn from on a logarithmic scale.
        whole: whether its numbers are whole.
        when: it is searched only where these keys have these values.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    when: Mapping[str, str] | None = None

    def applies(self, chosen: Mapping[str, str]) -> bool:
        return all(chosen.get(key) == value for key, value in (self.when or {}).items())

    def drawn(self, generator: random.Random) -> str:
        """A value, drawn evenly over the list or the range."""
        if self.values:
            return generator.choice(self.values)
        if self.whole and not self.log:
            return str(generator.randint(int(self.low), int(self.high)))
        if self.log:
            return self.text(self.low * (self.high / self.low) ** generator.random())
        return self.text(generator.uniform(self.low, self.high))

    def text(self, number: float) -> str:
        """A number of the range, as overrides write it."""
        within = min(max(number, self.low), self.high)
        return str(round(within)) if self.whole else f"{within:.{DIGITS}g}"

    @property
    def ends(self) -> list[str]:
        """Values at which a space that cannot run is found out."""
        return list(self.values) or [self.text(self.low), self.text(self.high)]


def parameter(key: str, value: Override | Any) -> Parameter:
    """What ``sweep.space.<key>`` or a range in the command line says.

    Raises:
        ConfigError: it is no space, or an empty one.
    """
    shown = f"sweep.space.{key}"
    if isinstance(value, Mapping):
        when = value.get("when")
        if unknown := sorted(set(value) - set(LEAF)):
            raise ConfigError(f"{shown}.{unknown[0]}", value[unknown[0]], f"use {', '.join(LEAF)}", "no such entry")
        condition = {name: _text(name, one) for name, one in when.items()} if isinstance(when, Mapping) else None
        if "values" in value:
            return _listed(shown, key, [_text(key, one) for one in value["values"] or ()], condition)
        return _range(shown, key, value.get("low"), value.get("high"), bool(value.get("log")), condition)
    if isinstance(value, list):
        return _listed(shown, key, [_text(key, one) for one in value], None)
    if isinstance(value, str):
        try:
            value = OverridesParser.create().parse_override(f"{key}={value}")
        except HydraException as error:
            raise ConfigError(shown, value, "write interval(1e-5,1e-3), or a list of values", str(error)) from error
    if not isinstance(value, Override):
        raise ConfigError(shown, value, "write interval(1e-5,1e-3), tag(log,interval(1e-5,1e-3)), or a list of values")
    sweep = value.value()
    if isinstance(sweep, IntervalSweep):
        return _range(shown, key, sweep.start, sweep.end, "log" in sweep.tags, None)
    if not value.is_sweep_override():
        return _listed(shown, key, [value.get_value_element_as_str()], None)
    return _listed(shown, key, list(value.sweep_string_iterator()), None)


def _listed(shown: str, key: str, values: list[str], when: Mapping[str, str] | None) -> Parameter:
    if not values:
        raise ConfigError(shown, "[]", "give values", "the space is empty")
    return Parameter(key, tuple(dict.fromkeys(values)), when=when)


def _range(shown: str, key: str, low: Any, high: Any, log: bool, when: Mapping[str, str] | None) -> Parameter:
    numbers = [end for end in (low, high) if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not numbers[0] < numbers[1]:
        raise ConfigError(shown, f"interval({low},{high})", "give a low and a higher end", "the space is empty")
    if log and numbers[0] <= 0:
        raise ConfigError(shown, f"interval({low},{high})", "begin above 0", "a logarithmic scale has no 0")
    hint = dict(schema_keys()).get(key)
    whole = hint is int or "int" in str(hint).split() or (hint is None and all(isinstance(end, int) for end in numbers))
    if all(isinstance(end, int) for end in numbers) and hint is not float:
        whole = True
    return Parameter(key, (), float(numbers[0]), float(numbers[1]), log, whole, when)


def ordered(space: Mapping[str, Parameter]) -> list[Parameter]:
    """The parameters, each after those that its condition names.

    Raises:
        ConfigError: a condition never holds.
    """
    for one in space.values():
        for key, value in (one.when or {}).items():
            if value not in (space[key].values if key in space else ()):
                fix = f"search {key} too, by a list of values with {value} among them"
                raise ConfigError(f"sweep.space.{one.key}.when.{key}", value, fix, "it never holds")
    left, there = dict(space), list[Parameter]()
    while left:
        ready = next((one for one in left.values() if not left.keys() & (one.when or {}).keys()), None)
        if ready is None:
            key, fix = next(iter(left)), "let one of these parameters have none"
            raise ConfigError(f"sweep.space.{key}.when", "...", fix, "the conditions wait for one another")
        there.append(left.pop(ready.key))
    return there


def _text(key: str, value: object) -> str:
    if isinstance(value, str):
        return as_override(key, value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_override(key: str, text: str) -> str:
    """A text as Hydra reads it: a number, word, list or mapping as it stands, any other quoted."""
    try:
        one = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        return hydra_quoted(text)
    return hydra_quoted(text) if one.is_sweep_override() else one.get_value_element_as_str()


def flat(space: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The parameters of ``sweep.space``, by their dotted keys."""
    for name, value in space.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not set(value) & {"low", "high", "values"}:
            yield from flat(value, f"{key}.")
        else:
            yield key, value


def as_record(space: list[Parameter]) -> list[dict[str, Any]]:
    return [{**vars(one), "values": list(one.values)} for one in space]


def from_record(records: list[dict[str, Any]]) -> list[Parameter]:
    return [Parameter(**{**record, "values": tuple(record["values"])}) for record in records]
